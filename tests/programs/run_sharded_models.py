"""Whole models on eight CPU devices against the same models on one; prints what was right.

With "few" as an argument it leaves out what differs least from the rest, with "others" it does only that.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import functools
import sys
import tempfile
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgg
import jgg.hf
import jgg.models
import jgg.train
from jgg.models import decoding, loss, placement
from jgg.models.head import Head
from jgg.models.placement import spec_of
from jgg.sharding import MoESharding
from tests.models.test_model_training import loss_of
from tests.support import delta_rule
from tests.support.closeness import assert_close, distance
from tests.support.models import DATA, config_of, loaded, logits_of, reference, with_mxfp4

TOKENS = np.random.default_rng(0).integers(0, 64, (8, 7))
# name: (family, which axes of a mesh a, b, c of 2 devices each split what, options of the model)
CASES = {
    "fsdp, data, expert by ragged_all_to_all, rematerialized": (
        "qwen3_moe",
        {"fsdp": "a", "data": "c", "expert": "b", "exchange": "ragged_all_to_all"},
        {"remat": "names"},
    ),
    "fsdp, expert, tensor, tied": ("gpt_oss", {"fsdp": "a", "expert": "b", "tensor": "c"}, {}),
    "latent attention, fsdp, data, expert, rematerialized": (
        "deepseek_v3",
        {"fsdp": "a", "data": "c", "expert": "b"},
        {"remat": "attention"},
    ),
    "recurrent layers, fsdp, data, expert": (
        "qwen3_5_moe_text",
        {"fsdp": "a", "expert": "b", "data": "c"},
        {"remat": "attention"},
    ),
    "each device its own sequences, fsdp, expert, data": (
        "glm4_moe",
        {"fsdp": "a", "expert": "b", "data": "c"},
        {"remat": "attention", "batch_invariant": True},
    ),
    "each device its own sequences, data, tensor": (
        "gpt_oss",
        {"data": ("a", "b"), "tensor": "c"},
        {"remat": "names", "batch_invariant": True},
    ),
    "each device its own sequences, latent attention": (
        "deepseek_v3",
        {"fsdp": "a", "expert": "b", "data": "c"},
        {"remat": "attention", "batch_invariant": True},
    ),
    "each device its own sequences, recurrent layers": (
        "qwen3_5_moe_text",
        {"fsdp": "a", "expert": "b", "data": "c"},
        {"remat": "attention", "batch_invariant": True},
    ),
    "experts beside a dense MLP, fsdp, expert": ("gemma4_text", {"fsdp": "a", "expert": "b"}, {"remat": "offload"}),
    "each device its own sequences, experts beside a dense MLP": (
        "gemma4_text",
        {"fsdp": "a", "expert": "b", "data": "c"},
        {"remat": "attention", "batch_invariant": True},
    ),
}
ALL = {"fsdp": "a", "expert": "b", "data": "c"}


@functools.cache
def mesh():
    return jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


def config(family):
    return jgg.models.model_config(config_of(family))


def assert_in_place(state, sharding, is_state_of_optimizer=False):
    """Each array is split as its name says, and no device has more than its part."""
    for path, variable in nnx.to_flat_state(state):
        for array in jax.tree.leaves(variable.get_value()):
            if is_state_of_optimizer and not array.ndim:
                continue
            names = tuple(map(str, path))
            is_stacked = any(name.startswith(("layers", "dense_layers")) for name in names)
            spec = spec_of(names, array.shape[is_stacked:], sharding)
            expected = sharding.named(jax.P(None, *spec) if is_stacked else spec)
            assert array.sharding.is_equivalent_to(expected, array.ndim), (names, array.sharding)
            (part,) = {shard.data.shape for shard in array.addressable_shards}
            assert part == expected.shard_shape(array.shape), names


def check(name):
    """Parameters, the loss, and a step of AdamW: its first moments are all gradients, times 0.1."""
    family, axes, options = CASES[name]
    sharding = MoESharding(mesh(), **axes)
    create = functools.partial(jgg.models.Decoder, config(family), dtype=jnp.float32, **options)
    whole, model = create(rngs=nnx.Rngs(0)), create(rngs=nnx.Rngs(0), sharding=sharding)
    assert_in_place(nnx.state(model), sharding)
    assert_close(nnx.state(model), nnx.state(whole), 1e-5, f"{name}: parameters")
    optimizers = [nnx.Optimizer(each, optax.adamw(1e-3, weight_decay=0.1), wrt=nnx.Param) for each in (whole, model)]
    want, got = (step(*each) for each in zip((whole, model), optimizers, strict=True))
    assert_close(got, want, 1e-4, f"{name}: loss")
    want, got = map(nnx.state, optimizers)
    assert_close(got, want, 1e-4, f"{name}: the optimizer's state")
    assert_in_place(got, sharding, is_state_of_optimizer=True)
    assert_in_place(nnx.state(model), sharding)


def check_logits(name):
    """The logits alone, those of transformers: they compile in a fraction of the time of a step."""
    family, axes, options = CASES[name]
    sharding = MoESharding(mesh(), **axes)
    expected = reference(family)
    got = logits_of(loaded(family, sharding=sharding, **options), np.tile(expected["tokens"], (4, 1)))
    assert_close(got, np.tile(expected["logits"], (4, 1, 1)), 1e-4, f"{name}: logits")


@nnx.jit
def step(model, optimizer):
    """A step; the loss before."""
    before, gradients = nnx.value_and_grad(loss_of)(model, TOKENS)
    with jax.numpy_dtype_promotion("standard"):  # of optax
        optimizer.update(model, gradients)
    return before


def check_masters():
    """Float32 masters of bfloat16 parameters are split as these."""
    sharding = MoESharding(mesh(), **ALL)
    dtypes = {"dtype": jnp.float32, "param_dtype": jnp.bfloat16}
    model = jgg.models.Decoder(config("glm4_moe"), **dtypes, sharding=sharding, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jgg.train.float32_masters(optax.adamw(1e-3)), wrt=nnx.Param)
    step(model, optimizer)
    masters, params = optimizer.opt_state.masters, nnx.state(model, nnx.Param)
    for state in (params, masters):
        assert_in_place(nnx.state(state), sharding)
    got, want = (jax.tree.leaves(nnx.to_pure_dict(nnx.state(each))) for each in (params, masters))
    for param, master in zip(got, want, strict=True):
        assert master.dtype == jnp.float32
        np.testing.assert_array_equal(param, master.astype(jnp.bfloat16))


def check_folders():
    """Loading goes straight to the shards, saving gives the folder back, bit for bit."""
    sharding, places = MoESharding(mesh(), **ALL), {}

    def put(array, place):
        places[np.shape(array)] = place
        return placement.put(array, place)

    with (
        jax.transfer_guard_device_to_device("disallow_explicit"),
        mock.patch("jgg.models.loading.put", side_effect=put),
    ):
        model = jgg.models.load(DATA / "glm4_moe", sharding=sharding)
    assert_in_place(nnx.state(model), sharding)
    for name in ("w_gate_up", "w_down"):  # of each layer, before it is put into the stack
        shape, spec = getattr(model.layers.moe, name).shape[1:], sharding.weight_specs("ekn")[name]
        assert places[shape].is_equivalent_to(sharding.named(spec), 3), (name, places[shape])
    with tempfile.TemporaryDirectory() as folder:
        jgg.models.save(model, Path(folder) / "copy")
        got, want = (jgg.hf.Checkpoint(each) for each in (Path(folder) / "copy", DATA / "glm4_moe"))
        assert got.keys() == {name for name in want if not name.startswith("model.layers.3.")}
        for name, array in got.items():
            np.testing.assert_array_equal(array.view(np.uint16), want[name].view(np.uint16), name)


def check_adapters():
    """Merged parameters, which stay in their places; check_trained_adapters has gradients."""
    sharding = MoESharding(mesh(), **ALL)
    whole, model = loaded("qwen3_moe"), loaded("qwen3_moe", sharding=sharding)
    for each in (whole, model):
        jgg.models.load_adapter(each, DATA.parent / "model_adapters" / "qwen3_moe")
    assert_in_place(nnx.state(model), sharding)
    for each in (model, whole):
        nnx.update(each, jax.tree.map(lambda a: a + 0.1, nnx.state(each, nnx.LoRAParam)))
        each.merge_adapters()
    assert_in_place(nnx.state(model), sharding)
    assert_close(nnx.state(model), nnx.state(whole), 1e-5, "merged")


def check_quantized():
    """Experts in FP8, quantized on loading, with adapters, given choices and a mask: logits and gradients."""
    sharding, options = MoESharding(mesh(), **ALL), {"experts": jgg.Fp8(), "lora_rank": 4, "remat": "names"}
    mask, given = np.arange(7) < np.arange(8)[:, None], np.random.default_rng(0).integers(-1, 4, (2, 8, 7, 2))

    @nnx.jit
    def run(model):
        def loss(model):
            logits = model(TOKENS, mask=mask, topk_indices=given)
            return jnp.mean(jnp.square(logits)), logits

        (_, logits), gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam), has_aux=True)(model)
        return logits, gradients

    changes = {"hidden_size": 256, "moe_intermediate_size": 128}
    with tempfile.TemporaryDirectory() as folder:
        wide = jgg.models.model_config(config_of("qwen3_moe") | changes)
        jgg.models.save(jgg.models.Decoder(wide, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), Path(folder) / "wide")
        whole, model = (
            jgg.models.load(Path(folder) / "wide", dtype=jnp.float32, sharding=own, **options)
            for own in (None, sharding)
        )
    assert_in_place(nnx.state(model), sharding)
    assert model.layers.moe.w_down.get_value().values.dtype == jnp.float8_e4m3fn
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(lambda a: rng.normal(0, 0.1, a.shape).astype(a.dtype), nnx.state(whole, nnx.LoRAParam))
    for each in (whole, model):
        places = jax.tree.map(lambda a: a.sharding, nnx.state(each, nnx.LoRAParam))
        nnx.update(each, jax.device_put(adapters, places))
    (got, got_gradients), (want, want_gradients) = run(model), run(whole)
    assert got.sharding.is_equivalent_to(sharding.named(sharding.token_spec), 3), got.sharding
    # where sums differ in the last bit, some numbers are rounded to their other neighbour in FP8
    assert distance(got, want) < 0.03
    assert_in_place(got_gradients, sharding)
    for own, expected in zip(*map(jax.tree.leaves, (got_gradients, want_gradients)), strict=True):
        assert distance(own, expected) < 0.1  # gradients are sent in e5m2


def check_trained_adapters():
    """Adapters of MXFP4 experts, trained on eight devices and on one, and what two devices compute with them."""

    def loss(model, batch):
        return model.loss(batch[:, :-1], batch[:, 1:]), {}

    def trained(folder, sharding):
        model = jgg.models.load(folder, sharding=sharding, lora_rank=4, remat="names", **options)
        rng = np.random.default_rng(0)
        adapters = jax.tree.map(lambda a: rng.normal(0, 0.1, a.shape).astype(a.dtype), nnx.state(model, nnx.LoRAParam))
        places = jax.tree.map(lambda a: a.sharding, nnx.state(model, nnx.LoRAParam))
        nnx.update(model, jax.device_put(adapters, places))
        split = None if sharding is None else sharding.named(sharding.token_spec)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5))
        trainer = jgg.train.Trainer(model, optimizer, loss, wrt=nnx.LoRAParam, batch_sharding=split)
        with jax.numpy_dtype_promotion("standard"):  # of optax
            list(trainer.fit(lambda step: np.roll(TOKENS, step, axis=1), 2))
        return trainer.model

    options = {"dtype": jnp.float32, "experts": "as stored"}
    with tempfile.TemporaryDirectory() as folder:
        one_layer = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
        base, adapter = with_mxfp4(Path(folder) / "base", **one_layer), Path(folder) / "adapter"
        sharding = MoESharding(mesh(), **ALL, exchange="ragged_all_to_all")
        whole, model = trained(base, None), trained(base, sharding)
        assert_in_place(nnx.state(model), sharding)
        assert_close(*(nnx.state(each, nnx.LoRAParam) for each in (model, whole)), 1e-4, "trained adapters")
        jgg.models.save_adapter(model, adapter)
        two = jax.sharding.Mesh(jax.devices()[-2:], ("a",), axis_types=(jax.sharding.AxisType.Auto,))
        elsewhere = jgg.models.load(base, sharding=MoESharding(two, expert="a"), **options)
        jgg.models.load_adapter(elsewhere, adapter)
        assert_close(logits_of(elsewhere, TOKENS), logits_of(whole, TOKENS), 1e-4, "logits of trained adapters")


def check_generation():
    """Two samples of each of three prompts on four devices that could split sequences."""
    whole, model = loaded("qwen3_moe"), loaded("qwen3_moe", sharding=MoESharding(mesh(), **ALL))
    options = {"lengths": [7, 2, 4], "temperature": [0.9, 0.0, 1.5], "top_p": 0.9, "top_k": 40, "seeds": [2, 1, 0]}
    options |= {"num_samples": 2, "details": True, "prefill_chunk": 4, "frequency_penalty": [0.5, 1.0, 0.0]}
    got, want = (jgg.models.generate(each, TOKENS[:3], 4, **options) for each in (model, whole))
    for name in ("tokens", "lengths", "topk_indices"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    for name in ("log_probabilities", "sampled_log_probabilities"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=0, atol=1e-5)
    in_fp8 = {**options, "cache_dtype": "float8_e4m3fn"}
    got_fp8, want_fp8 = (jgg.models.generate(each, TOKENS[:3], 4, **in_fp8) for each in (model, whole))
    # what differs by rounding may be kept as neighbouring numbers
    assert np.mean(got_fp8.tokens == want_fp8.tokens) >= 0.9
    assert np.median(np.abs(got_fp8.log_probabilities - want_fp8.log_probabilities)) < 1e-4
    caches = jax.jit(lambda model: model.empty_caches(8, 9, cache_dtype="float8_e4m3fn"))(model)
    assert all(leaf.sharding.shard_shape(leaf.shape)[1] == 1 for leaf in jax.tree.leaves(caches))
    number = decoding.start.num_compiled(), decoding.advance.num_compiled()
    stream = jgg.models.stream(model, TOKENS[:3], 4, **options, chunk=1)
    assert [new.shape for new in stream] == [(6, 1)] * 4
    for one, other in zip(stream.result(), got, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (decoding.start.num_compiled(), decoding.advance.num_compiled()) == number


def check_mask_and_choices():
    """Tokens that count, in different numbers on each device, and given experts."""
    mask, given = np.arange(7) < np.arange(8)[:, None], np.random.default_rng(0).integers(-1, 4, (2, 8, 7, 2))

    def results_of(sharding):
        @nnx.jit
        def run(model):
            return nnx.capture(model, nnx.Intermediate)(TOKENS, mask=mask, topk_indices=given)

        logits, sown = run(loaded("qwen3_moe", sharding=sharding))
        assert sown["group_sizes"][0].sum() == 2 * 2 * mask.sum()
        return logits, *(value for (value,) in nnx.to_pure_dict(sown).values())

    want = results_of(None)
    for exchange in ("all_gather", "ragged_all_to_all"):
        got = results_of(MoESharding(mesh(), **ALL, exchange=exchange))
        assert_close(got, want, 1e-5, f"masked tokens, {exchange}")


def check_without_adapters():
    """The model that adapters were added to."""
    model, base = (loaded("glm4_moe", sharding=MoESharding(mesh(), **ALL)) for _ in range(2))
    jgg.models.load_adapter(model, DATA.parent / "model_adapters" / "glm4_moe-all")
    got, want = nnx.jit(lambda model: model(TOKENS, adapters=False))(model), nnx.jit(lambda model: model(TOKENS))(base)
    assert_close(got, want, 1e-6, "without adapters")


def check_own_sequences():
    """Segments, and tokens for an odd number of prompts, of a model whose devices each compute their own sequences."""
    whole = loaded("gpt_oss")
    model = loaded("gpt_oss", sharding=MoESharding(mesh(), data="a", tensor="c"), batch_invariant=True)
    segments = (np.arange(7) >= np.arange(8)[:, None] % 6 + 1).astype(np.int32)
    got, want = (nnx.jit(lambda model: model(TOKENS, segments))(each) for each in (model, whole))
    assert got.sharding.is_equivalent_to(model.options.sharding.named(jax.P("a")), 3), got.sharding
    assert_close(got, want, 1e-5, "logits of segments")
    options = {"lengths": [7, 2, 4], "temperature": 0.9, "key": jax.random.key(0)}
    got, want = (jgg.models.generate(each, TOKENS[:3], 4, **options) for each in (model, whole))
    np.testing.assert_array_equal(got, want)


def check_delta_rule_in_order():
    """The kernel on rows that plain jit splits over devices."""
    (*tokens, state), resets, dy, d_state = delta_rule.random((2, 5, 1, 2, 8, 4))
    operands = [*tokens, state], resets, dy, jnp.asarray(d_state, jnp.float32)
    split = jax.tree.map(lambda array: jax.device_put(array, jax.NamedSharding(mesh(), jax.P("a"))), operands)
    run = functools.partial(delta_rule.run_and_gradients, implementation="interpret", in_order=True)
    (got, gradients), (want, want_gradients) = run(*split), run(*operands)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert_close(gradients, want_gradients, 1e-5, "gradients of the delta rule")


def check_losses():
    """The gradients of weighted losses of sequences that devices split; two devices have the same ones."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, weights = (
        jax.random.normal(key, shape) for key, shape in zip(keys, ((8, 7, 8), (8, 64), (8, 7)), strict=True)
    )

    def by_target(x, w, weights, sharding):
        return jnp.sum(weights * loss.losses_of(x, w, jnp.asarray(TOKENS), Head(), sharding).losses)

    def as_one_sum(x, w, weights, sharding):
        return loss.loss_of(x, w, jnp.asarray(TOKENS), weights, Head(), sharding)

    sharding = MoESharding(mesh(), fsdp="a", expert="b", tensor="c")
    for function in (by_target, as_one_sum):
        run = jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2)), static_argnums=3)
        assert_close(run(x, w, weights, sharding), run(x, w, weights, None), 1e-5, function.__name__)


def check_what_is_kept():
    """The backward pass gathers parameters again: no device keeps one whole between the passes."""
    model = loaded("glm4_moe", sharding=MoESharding(mesh(), fsdp="a"))
    graphdef, state = nnx.split(model)
    _, pull_back = jax.vjp(jax.jit(lambda state: loss_of(nnx.merge(graphdef, state), TOKENS)), state)
    split = {
        variable.get_value().shape: variable.get_value().sharding
        for path, variable in nnx.to_flat_state(state)
        if "layers" in path and variable.get_value().ndim == 3
    }
    kept = [leaf for leaf in jax.tree.leaves(pull_back) if leaf.shape in split]
    # a whole one in each device's part of the experts' shard_map would have another shape
    assert {leaf.shape for leaf in kept} == split.keys(), [leaf.shape for leaf in kept]
    for leaf in kept:
        assert leaf.sharding.is_equivalent_to(split[leaf.shape], leaf.ndim), (leaf.shape, leaf.sharding)


# "few" checks the logits of one of these cases, and "others" a step and the logits of the rest
LOGITS = (
    "latent attention, fsdp, data, expert, rematerialized",
    "recurrent layers, fsdp, data, expert",
    "each device its own sequences, data, tensor",
    "each device its own sequences, experts beside a dense MLP",
)
CHECKS = {name: functools.partial(check, name) for name in CASES}
CHECKS |= {f"{name}: logits": functools.partial(check_logits, name) for name in LOGITS}
CHECKS |= {
    function.__name__: function
    for function in (
        check_masters,
        check_folders,
        check_adapters,
        check_quantized,
        check_trained_adapters,
        check_generation,
        check_mask_and_choices,
        check_without_adapters,
        check_own_sequences,
        check_delta_rule_in_order,
        check_losses,
        check_what_is_kept,
    )
}
OTHERS = {
    *LOGITS,
    "recurrent layers, fsdp, data, expert: logits",
    "each device its own sequences, data, tensor: logits",
    "each device its own sequences, experts beside a dense MLP: logits",
    "each device its own sequences, latent attention",
    "each device its own sequences, recurrent layers",
    "check_adapters",
    "check_mask_and_choices",
    "check_what_is_kept",
    "fsdp, expert, tensor, tied",
    "each device its own sequences, fsdp, expert, data",
    "experts beside a dense MLP, fsdp, expert",
    "check_masters",
    "check_quantized",
    "check_trained_adapters",
    "check_without_adapters",
    "check_own_sequences",
    "check_delta_rule_in_order",
}


def main(which="all"):
    assert jax.device_count() == 8
    for name, run in CHECKS.items():
        if which == "all" or (name in OTHERS) == (which == "others"):
            run()
            print(name, flush=True)
    print("all right", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    main(*sys.argv[1:])
