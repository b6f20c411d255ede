"""One token, one result: with `batch_invariant`, kernels with a fixed order compute what gives a token's logits."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg
import jgg.models
import jgg.nnx
from jgg.primitives.operation import Call
from tests.support.models import FAMILIES, MORE_FAMILIES, config_of, loaded, reference, with_mxfp4

REFUSED = ("llama4",)  # chunks of 4 tokens
EVERY_FAMILY = [family for family in (*FAMILIES, *MORE_FAMILIES) if family not in REFUSED]

RECURRENT = "qwen3_next", "qwen3_5_moe_text"
# what moves or rounds numbers
EXACT = {
    "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "copy", "dynamic_slice", "gather",
    "jgg_barrier", "max", "min", "name", "pad", "reduce_precision", "reshape", "scatter", "select_n", "slice", "split",
    "squeeze", "stop_gradient", "transpose",
}  # fmt: skip


def equations(jaxpr):
    """The equations of a program, those inside of others too, but not what a product of jgg's is made of."""
    for equation in jaxpr.eqns:
        inner = jax.tree.leaves(equation.params, is_leaf=lambda each: hasattr(each, "eqns") or hasattr(each, "jaxpr"))
        inner = [getattr(each, "jaxpr", each) for each in inner if hasattr(each, "eqns") or hasattr(each, "jaxpr")]
        if not inner:
            yield equation
        for each in inner:
            yield from equations(each)


def left_to_xla(compute, *arguments):
    """How often a program for a GPU leaves each operation that rounds floats to XLA."""
    with jgg.target(90):
        program = jax.make_jaxpr(compute)(*arguments).jaxpr
    floats = [
        equation
        for equation in equations(program)
        if any(jnp.issubdtype(v.aval.dtype, jnp.floating) and v.aval.size > 1 for v in equation.outvars)
    ]
    own = [equation for equation in floats if not isinstance(equation.params.get("call"), Call)]
    names = collections.Counter(equation.primitive.name for equation in own)
    return {name: count for name, count in names.items() if name not in EXACT}


def computations(model):
    """The model's arrays, and functions of them: the losses of tokens, and the logits after one more token."""
    graphdef, state = nnx.split(model)
    tokens = jnp.zeros((2, 16), jnp.int32)

    def losses(state):
        return nnx.merge(graphdef, state).losses(tokens, tokens)

    def decoded(state):
        model = nnx.merge(graphdef, state)
        x, _ = model.run_layers(tokens[:, :1], tokens[:, :1], model.empty_caches(2, 32))
        return model.logits(x)

    return state, losses, decoded


@pytest.fixture
def without_attention_and_experts(monkeypatch):
    """They have tests of their own; here attention returns its queries, and a layer of experts its x."""
    monkeypatch.setattr("jgg.models.attention.attend", lambda q, k, v, **_: q)
    monkeypatch.setattr(jgg.nnx.MoE, "__call__", lambda self, x, *_, **__: x)


@pytest.mark.parametrize(
    ("family", "remat"),
    [
        *((family, "none") for family in (*FAMILIES, "deepseek_v3")),
        *(pytest.param(family, "attention", marks=[pytest.mark.sweep] * (family != "glm4_moe")) for family in FAMILIES),
    ],
)
def test_xla_is_left_what_it_cannot_round_in_two_ways(family, remat, without_attention_and_experts):
    """A sum of two arrays that kernels wrote, a product with a scale, and the cosines and sines of positions."""
    model = loaded(family, dtype=jnp.bfloat16, batch_invariant=True, remat=remat)
    config, (state, losses, decoded) = model.config, computations(model)
    stacks = len(config.plan)
    of_angles = {"mul": 3, "cos": 1, "sin": 1}
    for compute in (losses, decoded):
        found = left_to_xla(compute, state)
        scaled = (config.embedding_scale != 1) + (compute is decoded)
        sums = stacks * (2 if remat == "attention" else 1)
        products = sums if config.residual_scale != 1 else 0
        assert found == of_angles | {"mul": 3 + scaled + products, "add": sums}


@pytest.mark.parametrize("family", RECURRENT)
def test_xla_is_left_no_sums_over_an_axis_of_recurrent_layers(family, without_attention_and_experts):
    """Gates, and the convolution of few tokens, are computed element by element; other sums are those of kernels."""
    state, *functions = computations(loaded(family, dtype=jnp.bfloat16, batch_invariant=True))
    for compute in functions:
        found = left_to_xla(compute, state).keys() - {"stop_gradient", "scatter"}
        assert found == {"mul", "cos", "sin", "add", "neg", "exp", "sub", "abs", "log1p", "logistic"}


def test_packed_sequences_are_attended_to_by_the_kernel():
    graphdef, state = nnx.split(loaded("gpt_oss", dtype=jnp.bfloat16, batch_invariant=True))
    tokens, segments = jnp.zeros((2, 16), jnp.int32), jnp.arange(32, dtype=jnp.int32).reshape(2, 16) // 5
    with jgg.target(90):
        program = jax.make_jaxpr(lambda state: nnx.merge(graphdef, state)(tokens, segments))(state)
    assert " attend[" in str(program)


def test_without_the_option_xla_multiplies(without_attention_and_experts):
    """So the test above finds what it looks for."""
    graphdef, state = nnx.split(loaded("qwen3_moe", dtype=jnp.bfloat16))
    tokens = jnp.zeros((2, 16), jnp.int32)
    assert left_to_xla(lambda state: nnx.merge(graphdef, state)(tokens), state)["dot_general"] > 0


losses_of = jax.jit(lambda model, tokens, segments=None: model.losses(tokens[:, :-1], tokens[:, 1:], segments))


def random_tokens(*shape, vocabulary=64):
    return jnp.asarray(np.random.default_rng(0).integers(0, vocabulary, shape), jnp.int32)


def check_batches(model, tokens):
    """The losses of rows of tokens do not depend on the other rows, on their order, or on what follows or surrounds."""
    count, length = tokens.shape
    want = np.asarray(losses_of(model, tokens))
    for row in (0, count - 1):
        np.testing.assert_array_equal(losses_of(model, tokens[row : row + 1])[0], want[row])
    np.testing.assert_array_equal(losses_of(model, tokens[::-1])[::-1], want)
    padded = jnp.pad(tokens, ((0, 0), (0, 27)), constant_values=3)
    np.testing.assert_array_equal(losses_of(model, padded)[:, : length - 1], want)
    # one sequence after the other in each row, the last of one and the first of the next not a target
    packed = tokens.reshape(count // 2, 2 * length)
    segments = jnp.broadcast_to(
        jnp.arange(2 * length - 1, dtype=jnp.int32)[None] // length, (count // 2, 2 * length - 1)
    )
    got = np.asarray(losses_of(model, packed, segments)).reshape(count // 2, -1)
    np.testing.assert_array_equal(got[:, : length - 1], want[::2])
    np.testing.assert_array_equal(got[:, length:], want[1::2])


def check_samples(model, prompts, lengths, new_tokens=20, **options):
    """The log-probabilities of new tokens are those that the model gives their rows, alone and together."""
    named = {"lengths": lengths, "temperature": 1.0, "seeds": np.arange(len(prompts)), "details": True}
    options = named | {"min_p": 0.01, "repetition_penalty": 1.1, "frequency_penalty": 0.3} | options
    generated = jgg.models.generate(model, prompts, new_tokens, **options)
    rows = generated.training_rows(prompts, lengths)
    run = jax.jit(lambda model, tokens, targets: model.losses(tokens, targets))
    losses = run(model, rows.tokens, rows.targets)
    np.testing.assert_array_equal(jnp.where(rows.is_new, -losses, 0.0), rows.log_probabilities)
    alone = run(model, rows.tokens[1:2], rows.targets[1:2])
    np.testing.assert_array_equal(alone[0], losses[1])
    assert (rows.log_probabilities != 0).sum() > len(prompts)
    return generated


of_family = functools.partial(loaded, dtype=jnp.bfloat16, batch_invariant=True)


@pytest.mark.interpret
@pytest.mark.sweep
@pytest.mark.parametrize("family", RECURRENT)
def test_samples_of_recurrent_layers_interpreted(family):
    model, prompts = loaded(family, batch_invariant=True, implementation="interpret"), reference(family)["prompts"]
    check_samples(model, prompts[:2, :3], np.array([1, 3]), 2)


@pytest.mark.gpu
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_the_losses_of_a_row_do_not_depend_on_the_batch(family):
    check_batches(of_family(family), random_tokens(64, 41))


@pytest.mark.gpu
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_samples_have_the_probabilities_that_training_gives_them(family):
    model, prompts, lengths = of_family(family), reference(family)["prompts"], np.array([1, 5, 9])
    generated = check_samples(model, prompts, lengths, num_samples=2)
    chunked = check_samples(model, prompts, lengths, num_samples=2, prefill_chunk=4)
    alone = check_samples(model, prompts[[2, 1]], lengths[[2, 1]], num_samples=2, seeds=[2, 1])
    jax.tree.map(np.testing.assert_array_equal, chunked, generated)
    replaced = check_samples(model, prompts, lengths, num_samples=2, rows=2)
    jax.tree.map(np.testing.assert_array_equal, replaced, generated)
    np.testing.assert_array_equal(alone.tokens[:2], generated.tokens[4:])
    np.testing.assert_array_equal(alone.log_probabilities[:2], generated.log_probabilities[4:])


def adapted(model):
    """The model with adapters that are not zero."""
    state = nnx.state(model, nnx.LoRAParam)
    leaves, structure = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    leaves = [0.1 * jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    nnx.update(model, jax.tree.unflatten(structure, leaves))
    return model


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{"remat": "names"}, {"remat": "attention", "unroll": 2}, {"lora_rank": 4}, {"param_dtype": jnp.float32}]
)
@pytest.mark.parametrize("family", ["granitemoe", "glm4_moe", "deepseek_v3", "qwen3_next"])
def test_with_options_of_training(family, options):
    model = adapted(of_family(family, **options))
    check_batches(model, random_tokens(8, 41))
    check_samples(model, reference(family)["prompts"], np.array([1, 5, 9]))


@pytest.mark.gpu
def test_after_a_step_of_training_and_as_its_loss():
    """The loss that is differentiated is the sum of the same losses."""
    model, tokens = of_family("olmoe", param_dtype=jnp.float32, remat="names"), random_tokens(8, 41)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def step(params):
        def one_loss(params):
            weights = jnp.zeros((8, 40)).at[3, 7].set(1.0)
            return nnx.merge(graphdef, params, rest).loss(tokens[:, :-1], tokens[:, 1:], weights=weights)

        loss, gradients = jax.value_and_grad(one_loss)(params)
        return loss, jax.tree.map(lambda param, gradient: param - 0.01 * gradient, params, gradients)

    want = losses_of(model, tokens)[3, 7]
    loss, params = step(params)
    np.testing.assert_array_equal(loss, want)
    model = nnx.merge(graphdef, params, rest)
    assert losses_of(model, tokens)[3, 7] != want
    check_batches(model, tokens)
    check_samples(model, reference("olmoe")["prompts"], np.array([1, 5, 9]))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"lora_rank": 4, "remat": "names"}])
def test_with_experts_in_mxfp4(options, tmp_path):
    folder = with_mxfp4(tmp_path / "model")
    model = adapted(jgg.models.load(folder, experts="as stored", batch_invariant=True, **options))
    check_batches(model, random_tokens(64, 41))
    check_samples(model, reference("gpt_oss")["prompts"], np.array([1, 5, 9]), num_samples=2)


def of_real_width(**options):
    """Two layers as wide as those of published models, of random parameters."""
    sizes = {
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 16,
        "num_experts_per_tok": 4, "moe_intermediate_size": 768, "vocab_size": 8195, "num_hidden_layers": 2,
    }  # fmt: skip
    own = {key: value for key, value in config_of("qwen3_moe").items() if key != "num_local_experts"}
    config = jgg.models.model_config(own | sizes)
    named = {"param_dtype": jnp.bfloat16, "batch_invariant": True, "rngs": nnx.Rngs(0)}
    return jgg.models.Decoder(config, **named | options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"quantization": jgg.Fp8()}, {"lora_rank": 16, "remat": "names"}])
def test_models_of_real_width(options):
    model = adapted(of_real_width(**options))
    check_batches(model, random_tokens(16, 257, vocabulary=8195))
    prompts = random_tokens(16, 70, vocabulary=8195)
    check_samples(model, prompts, np.arange(16) * 4 + 3, num_samples=4)
