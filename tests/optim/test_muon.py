"""`jgg.optim.muon` against optax's, and together with the rest of a step."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers

import jgg.models
import jgg.nnx
import jgg.optim
import jgg.train
from tests.support import processes
from tests.support.documents import code_of, run_code
from tests.support.models import DATA, config_of

pytestmark = pytest.mark.usefixtures("optax_promotion")
RNG = np.random.default_rng(5)
# a layer's experts, layers' matrices, single ones, and what AdamW trains
SHAPES = {"moe": {"w_gate_up": (2, 3, 8, 12), "w_router": (2, 8, 3)}, "w_o": (2, 12, 8), "w_q": (8, 20), "w_sq": (6, 6)}
SHAPES |= {"w_embedding": (9, 8), "w_head": (8, 9), "attention_norm": (2, 8), "b_q": (20,)}


def random_like(shapes, seed, dtype="float32"):
    rng = np.random.default_rng(seed)
    is_shape = lambda value: isinstance(value, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape), dtype), shapes, is_leaf=is_shape)


def run(optimizer, params, steps=3, dtype="float32"):
    """Parameters and state after some steps with random gradients."""
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(steps):
        updates, state = update(random_like(SHAPES, step, dtype), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_close(got, wanted, atol):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=atol), got, wanted)


OPTIONS = [
    {},
    {"ns_coeffs": "dion", "nesterov": False, "weight_decay": 0.1, "beta": 0.8},
    {"consistent_rms": 0.2, "weight_decay": 0.1, "adam_b1": 0.8, "adam_b2": 0.95, "adam_weight_decay": 0.3},
    {"ns_steps": 3, "adam_learning_rate": 1e-3, "adam_eps_root": 1e-8, "eps": 1e-3},
    {"ns_coeffs": ((3.0, -3.2, 1.2), (1.875, -1.25, 0.375)), "ns_steps": 2},
]
CASES = [pytest.param(own, "float32", 2e-4) for own in OPTIONS]
CASES += [pytest.param(own, "float16", 0.03, marks=[pytest.mark.sweep] * bool(own)) for own in OPTIONS]


@pytest.mark.parametrize(("options", "dtype", "atol"), CASES)
def test_it_is_optaxs(options, dtype, atol):
    params = random_like(SHAPES, 99)
    got, _ = run(jgg.optim.muon(0.1, **options, ns_dtype=dtype), params)
    numbers = jgg.optim.matrices(params)
    wanted, _ = run(optax.contrib.muon(0.1, **options, muon_weight_dimension_numbers=numbers), params)
    assert_close(got, wanted, atol)


def test_adaptive_is_of_each_matrix():
    """As optax's of one matrix; of a stack optax's multiplies all matrices by the sum over all of them."""
    g = random_like({"w": (3, 6, 9)}, 1)["w"]
    options = {"adaptive": True}
    mine = jgg.optim.muon(
        1.0, **options, ns_dtype="float32", muon_weight_dimension_numbers=lambda _: MuonDimensionNumbers(1, 2)
    )
    got, _ = mine.update(g, mine.init(g), g)
    theirs = optax.contrib.muon(1.0, **options)
    wanted = jnp.stack([theirs.update(each, theirs.init(each), each)[0] for each in g])
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [
        ((6, 9, 2), MuonDimensionNumbers(0, 1)),
        ((2, 4, 3, 7), MuonDimensionNumbers((1, 2), 3)),
        ((7, 2, 4, 3), MuonDimensionNumbers(-4, (2, -1))),
    ],
)
def test_any_axes_may_be_rows_and_columns(shape, numbers):
    g, make = random_like({"w": shape}, 2), {"muon_weight_dimension_numbers": {"w": numbers}}
    mine, theirs = jgg.optim.muon(1.0, ns_dtype="float32", **make), optax.contrib.muon(1.0, **make)
    got, wanted = (each.update(g, each.init(g), g)[0]["w"] for each in (mine, theirs))
    np.testing.assert_allclose(got, wanted, atol=1e-4)


OF_ATTENTION = ["attention/w_k", "attention/w_o", "attention/w_q", "attention/w_v"]
OF_MOE = ["moe/w_down", "moe/w_gate_up", "moe/w_shared_down", "moe/w_shared_gate_up"]


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("glm4_moe", {"layers": OF_ATTENTION + OF_MOE, "dense_layers": [*OF_ATTENTION, "mlp/w_down", "mlp/w_gate_up"]}),
        # neither their convolutions [L, channels, 1, taps] nor the gates of shared experts [L, H, 1]
        (
            "qwen3_next",
            {"layers": ["delta/w_ba", "delta/w_out", "delta/w_qkvz", *OF_MOE], "layers_3": OF_ATTENTION + OF_MOE},
        ),
    ],
)
def test_which_parameters_are_matrices(family, wanted):
    model = nnx.eval_shape(
        lambda: jgg.models.Decoder(jgg.models.model_config(config_of(family)), lora_rank=2, rngs=nnx.Rngs(0))
    )
    found = jax.tree_util.tree_flatten_with_path(
        jgg.optim.matrices(nnx.state(model)), is_leaf=lambda value: isinstance(value, MuonDimensionNumbers)
    )[0]
    names = ["/".join(str(key.key) for key in path if hasattr(key, "key")) for path, _ in found]
    assert sorted(names) == sorted(f"{stack}/{name}" for stack, own in wanted.items() for name in own)


def test_names_are_compared_whole():
    matrices = {"w_headless", "w_router_x", "w_embedding_2", "w_my_lora_x"}
    others = {"w_head", "w_router", "w_embedding", "w_q_lora_a", "w_router_lora_b", "q"}
    found = jgg.optim.matrices(dict.fromkeys(matrices | others, jnp.ones((4, 6))))
    assert {name for name, numbers in found.items() if numbers is not None} == matrices


def test_momentum_and_updates_have_their_dtypes():
    """bfloat16 parameters with a bfloat16 momentum, alone and under float32 masters."""
    params = random_like(SHAPES, 98, "bfloat16")
    in_float32 = functools.partial(jax.tree.map, lambda p: p.astype("float32"))
    wanted, _ = run(jgg.optim.muon(0.1, ns_dtype="float32"), in_float32(params))
    for optimizer in (jgg.optim.muon(0.1), jgg.train.float32_masters(jgg.optim.muon(0.1, mu_dtype="bfloat16"))):
        got, state = run(optimizer, params, dtype="bfloat16")
        assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype("bfloat16")}
        mus = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (2, 3, 8, 12)]
        assert jnp.dtype("bfloat16") in {mu.dtype for mu in mus}
        assert_close(in_float32(got), wanted, 0.06)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 0, 4), (0, 0)])
def test_a_parameter_may_be_empty(shape):
    params = {"w_o": jnp.zeros(shape), "w_q": jnp.eye(3)}
    optimizer = jgg.optim.muon(0.1)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert updates["w_o"].shape == shape and jnp.any(updates["w_q"])


@pytest.mark.parametrize("size", [1e-5, 1e12, 1e20, 1e30, 1e36])
def test_the_size_of_gradients_does_not_matter(size):
    g = random_like({"w_o": (2, 6, 9)}, 4)
    optimizer = jgg.optim.muon(1.0)
    (wanted, _), (got, _) = (optimizer.update(x, optimizer.init(x), x) for x in (g, {"w_o": size * g["w_o"]}))
    np.testing.assert_allclose(got["w_o"], wanted["w_o"], atol=0.03)


def test_hyperparameters_are_injected():
    params = random_like(SHAPES, 99)
    make = optax.inject_hyperparams(jgg.optim.muon, static_args="ns_steps")
    got, state = run(make(learning_rate=lambda step: 0.1 / (step + 1), weight_decay=0.1, consistent_rms=0.2), params)
    schedule = lambda step: 0.1 / (step + 1)  # noqa: E731
    wanted, _ = run(jgg.optim.muon(schedule, weight_decay=0.1, consistent_rms=0.2), params)
    assert_close(got, wanted, 1e-5)
    np.testing.assert_allclose(state.hyperparams["learning_rate"], 0.1 / 3, rtol=1e-6)


def test_a_layer_learns_with_the_trainer(tmp_path):
    """One matrix is frozen while others train; a stopped run continues to the same bits."""
    x = jnp.asarray(RNG.normal(size=(2, 16, 8)), jnp.float32)

    def loss(layer, batch):
        return jnp.mean(jnp.square(layer(batch) - jnp.flip(batch, -1))), {}

    def trainer():
        layer = jgg.nnx.MoE(8, 16, num_experts=3, topk=2, rngs=nnx.Rngs(0))
        layer.w_down = jgg.nnx.Frozen(layer.w_down[...])
        return jgg.train.Trainer(layer, jgg.optim.muon(0.05, ns_coeffs="polar_express"), loss)

    whole, stopped, going_on = trainer(), trainer(), trainer()
    loss_of = nnx.jit(lambda layer: loss(layer, x)[0])
    before = loss_of(whole.model)
    list(whole.fit(lambda step: x, 20, every=()))
    list(stopped.fit(lambda step: x, 10, every=(), checkpoints=tmp_path))
    list(going_on.fit(lambda step: x, 20, every=(), checkpoints=tmp_path))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(going_on.model), nnx.state(whole.model))
    assert loss_of(whole.model) < 0.9 * before


@pytest.mark.parametrize(
    ("options", "params", "message"),
    [
        ({}, {"scale": jnp.ones((3, 4))}, "muon_weight_dimension_numbers must choose a parameter, got none"),
        (
            {"muon_weight_dimension_numbers": {"w": MuonDimensionNumbers(0, 2)}},
            {"w": jnp.ones((3, 4))},
            "must name axes of",
        ),
        (
            {"muon_weight_dimension_numbers": {"w": MuonDimensionNumbers(0, -2)}},
            {"w": jnp.ones((3, 4))},
            "different axes",
        ),
        (
            {"muon_weight_dimension_numbers": {"v": None}},
            {"w": jnp.ones((3, 4))},
            r"for the parameter \['w'\], got none",
        ),
        ({"ns_steps": 0}, {"w_o": jnp.ones((3, 4))}, "ns_steps must be"),
        ({"ns_coeffs": "none"}, {"w_o": jnp.ones((3, 4))}, "ns_coeffs must be one of"),
    ],
)
def test_what_it_refuses(options, params, message):
    with pytest.raises(ValueError, match=message):
        jgg.optim.muon(0.1, **options).init(params)
    with pytest.raises(TypeError, match="mu_dtype"):
        jgg.optim.muon(0.1, mu_dtype="int8")


@pytest.mark.sweep
@pytest.mark.parametrize("which", ["few", "others"])
def test_eight_devices_make_the_same_updates(which):
    assert processes.run_program("run_sharded_optim", which, timeout=400).splitlines()[-1] == "all right"


@pytest.mark.sweep
def test_the_code_of_its_page(as_a_reader_runs_it, tmp_path):
    shutil.copytree(DATA / "qwen3_moe", tmp_path / "model")
    sections = "Muon", "8-bit states", "Several GPUs", "QK-Clip"
    names = run_code("\n".join(block for section in sections for block in code_of("optimizers.md", section)))
    assert names["losses"][-1] < 0.98 * names["losses"][0]
    names["step"](names["layer"], names["optimizer"], names["x"])  # with shardings, of one device
