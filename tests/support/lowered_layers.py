"""Lowers what layers use in addition to the products of `grouped_gemm`, for a GPU that need not be here."""

import functools

import jax
import jax.numpy as jnp

import jgg
from jgg.core.activations import ACTIVATIONS
from jgg.core.arguments import as_precision
from jgg.core.gpu_target import current_target
from jgg.core.problem_checks import check_problem
from jgg.core.schedule import group_bounds
from jgg.launching.choice import How
from jgg.launching.heuristic import hopper_config
from jgg.launching.kernel_configs import CONFIG_TYPES
from jgg.models.operations.attend import ATTEND, Attend
from jgg.models.operations.attend_latents import ATTEND_LATENTS, AttendLatents
from jgg.models.operations.attend_latents_one import ATTEND_LATENTS_ONE, AttendLatentsOne
from jgg.models.operations.attend_one import ATTEND_ONE, AttendOne
from jgg.models.operations.cache_layout import CacheLayout
from jgg.models.operations.cached_heads import empty_heads
from jgg.models.operations.delta_rule import DELTA_RULE, DeltaRule
from jgg.models.operations.delta_rule_backward import DELTA_RULE_BACKWARD, DeltaRuleBackward
from jgg.models.operations.delta_rule_in_order import DELTA_RULE_IN_ORDER, DeltaRuleInOrder
from jgg.models.operations.delta_rule_one import DELTA_RULE_ONE, DeltaRuleOne
from jgg.models.operations.losses import LOSSES, Scored
from jgg.models.operations.norm import NORM, NORM_BACKWARD, Norm, NormBackward
from jgg.models.operations.rotary import ROTARY, ROTARY_BACKWARD, Rotary, RotaryBackward
from jgg.products.activate import ACTIVATE, ACTIVATE_BACKWARD, Activate, ActivateBackward, Hidden
from jgg.products.add_gated import ADD_GATED, AddGated
from jgg.products.forward import FORWARD, Forward
from jgg.products.project_few import MOST_ROWS, PROJECT_FEW, ProjectFew
from jgg.products.symmetric import SYMMETRIC, Symmetric
from jgg.products.up import UP
from tests.support.lowering import EXPERTS, arguments, lower


def kernels_of(product, **parameters):
    """A product by its kernels, as a function of its operands."""
    return functools.partial(product, How("triton", current_target()), **parameters)


def lower_routing(num_experts):
    route = functools.partial(jgg.route, topk=8, implementation="triton")
    for num_tokens in (1, 32, 8192):
        lower(route, jax.ShapeDtypeStruct((num_tokens, num_experts), "float32"))
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, num_experts), (num_experts,))]
    lower(lambda logits, bias: route(logits, score="sigmoid", selection_bias=bias), *arrays)


def lower_logits(num_tokens, num_experts, dtype, w_dtype, precision=None):
    """The router's projection, in each of its tiles."""
    x, w = jax.ShapeDtypeStruct((num_tokens, 2880), dtype), jax.ShapeDtypeStruct((2880, num_experts), w_dtype)
    lower(functools.partial(jgg.router_logits, implementation="triton", precision=precision), x, w)


def lower_add_gated(features, dtype):
    """The sum with the shared experts' rows, with a gate and without."""
    y, gate = jax.ShapeDtypeStruct((100, features), dtype), jax.ShapeDtypeStruct((100, 1), "float32")
    for operands in (AddGated(y, y, gate), AddGated(y, y)):
        lower(kernels_of(ADD_GATED), operands)


def lower_activation(name, interleaved, features, dtype):
    activation = ACTIVATIONS[name]
    rows, hidden = 1000, Hidden(activation, interleaved)

    def forward_and_backward(pre, z, weights):
        backward = kernels_of(ACTIVATE_BACKWARD, hidden=hidden, scale_hidden=True)
        return kernels_of(ACTIVATE, hidden=hidden)(Activate(pre)), backward(
            ActivateBackward(pre, z, weights, weights > 0)
        )

    shapes = [
        ((rows, features * (1 + activation.is_gated)), dtype),
        ((rows, features), dtype),
        ((rows,), "float32"),
    ]
    lower(forward_and_backward, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))


def lower_norm(features, dtype):
    """Norms with what is added before, forward and backward."""
    rows, scale = jax.ShapeDtypeStruct((8192, features), dtype), jax.ShapeDtypeStruct((features,), dtype)

    def compute(x, added, scale):
        total, y = kernels_of(NORM, epsilon=1e-6)(Norm(x, added, scale))
        return kernels_of(NORM_BACKWARD, epsilon=1e-6)(NormBackward(total, scale, y, added))

    lower(compute, rows, rows, scale)


def lower_losses(vocabulary, scale, softcap=None):
    """The losses of targets by logits."""
    operands = Scored(jax.ShapeDtypeStruct((64, vocabulary), "float32"), jax.ShapeDtypeStruct((64,), "int32"))
    lower(kernels_of(LOSSES, scale=scale, softcap=softcap), operands)


def lower_rotary(heads, features, pairs, has_norm):
    """Queries, as many keys, and their norms, forward and backward."""
    rows, scale = ((8192, heads * features), "bfloat16"), ((features,), "bfloat16")
    shapes = [rows, rows, *[scale if has_norm else None] * 2, *[((4096, pairs), "float32")] * 2]
    parameters = {"head_features": features, "epsilon": 1e-6}

    def compute(operands):
        rotated = kernels_of(ROTARY, **parameters)(operands)
        kept = operands if has_norm else operands._replace(q=None, k=None)
        return kernels_of(ROTARY_BACKWARD, **parameters)(RotaryBackward(*kept, *rotated))

    lower(compute, Rotary(*(shape and jax.ShapeDtypeStruct(*shape) for shape in shapes)))


def lower_up(name, interleaved, w_layout, keeps):
    """The first product of a layer that gathers as it loads, and its activation."""
    activation = ACTIVATIONS[name]
    tokens, features, width, topk = 2048, 2048, 768 * (1 + activation.is_gated), 4
    shapes = {
        "x": ((tokens, features), "bfloat16"),
        "w": ((EXPERTS, *((width, features) if w_layout == "enk" else (features, width))), "bfloat16"),
        "group_sizes": ((EXPERTS,), "int32"),
        "gather_indices": ((tokens * topk,), "int32"),
    }

    def compute(arrays):
        problem = check_problem(**arrays, bias=None, topk=topk, permute_x=True, w_layout=w_layout)
        bounds = group_bounds(arrays["group_sizes"], problem.num_rows)
        up = kernels_of(UP, problem=problem, hidden=Hidden(activation, interleaved, keeps))
        return up(Forward(arrays["x"], arrays["w"], bounds, arrays["gather_indices"]))

    lower(compute, {key: jax.ShapeDtypeStruct(*shape) for key, shape in shapes.items()})


def lower_fp8(name, interleaved, gradient_dtype, hidden):
    """A layer in FP8, forward and backward."""
    activation = ACTIVATIONS[name]
    tokens, features, topk = 2048, 512, 4
    x = jax.ShapeDtypeStruct((tokens, features), "bfloat16")
    weights = [
        jax.ShapeDtypeStruct((EXPERTS, *shape), "bfloat16")
        for shape in ((hidden * (1 + activation.is_gated), features), (features, hidden))
    ]

    def compute(x, weights, logits):
        def forward(x, weights):
            routing = jgg.route(logits, topk, implementation="xla")
            return jgg.moe_mlp(
                x,
                *weights,
                routing,
                activation=activation,
                interleaved=interleaved,
                implementation="triton",
                quantization=jgg.Fp8(gradient_dtype, power_of_2_scales=interleaved),
            )

        y, vjp = jax.vjp(forward, x, weights)
        return y, vjp(y)

    lower(compute, x, weights, jax.ShapeDtypeStruct((tokens, EXPERTS), "float32"))


def lower_fp8_product(out_dtype, options):
    """A product of quantized operands, as a GPU without the warp-specialized kernel makes it too."""
    arrays, static = arguments(500, 512, 768, "enk", options, "bfloat16", None)

    def compute(arrays):
        quantized = {"x": jgg.quantize_tokens(arrays["x"]), "w": jgg.quantize_weights(arrays["w"])}
        return jgg.grouped_gemm(
            **arrays | quantized, **static, preferred_element_type=out_dtype, implementation="triton"
        )

    lower(compute, {name: array for name, array in arrays.items() if array is not None})


def lower_attend(heads, kv_heads, features, has_window, dtype, cache_dtype=None):
    """Attention of whole sequences, or, with a window, of those packed in rows and of some tokens to a cache."""
    batch, length = 2, 1000
    key = heads_of((1, batch, length, kv_heads, features), cache_dtype or dtype)
    operands = Attend(jax.ShapeDtypeStruct((batch, length, heads, features), dtype), key, key)
    if has_window:
        starts, is_local = jax.ShapeDtypeStruct((batch, length), "int32"), jax.ShapeDtypeStruct((), "bool")
        sinks = jax.ShapeDtypeStruct((heads,), "float32")
        operands = operands._replace(starts=starts, is_local=is_local, sinks=sinks)
    lower(kernels_of(ATTEND, scale=0.1, window=128 if has_window else None), operands)
    if has_window:
        layout = CacheLayout(length, 192, (True, False))
        cache = heads_of((1, batch, layout.cache_shape(2)[1], kv_heads, features), cache_dtype or dtype)
        number = jax.ShapeDtypeStruct((), "int32")
        operands = operands._replace(k=cache, v=cache, layer=number, offset=number, starts=None)
        lower(kernels_of(ATTEND, scale=0.1, window=128, layout=layout), operands)


def heads_of(shape, dtype):
    """Keys or values as caches hold them."""
    return jax.eval_shape(lambda: empty_heads(shape, jnp.dtype(dtype)))


def lower_attend_one(heads, kv_heads, features, has_window, dtype, cache_dtype=None):
    """Attention of one token to a cache that takes several programs; layers with a window have less room."""
    batch, capacity, layers, layout = 3, 1000, 2, None
    if has_window:
        layout = CacheLayout(capacity, 128, (True, False))
        layers, capacity = layout.cache_shape(layers)
    key, cache = (batch, kv_heads, features), (layers, batch, capacity, kv_heads, features)
    arrays = [jax.ShapeDtypeStruct((batch, heads, features), dtype)]
    arrays += [heads_of(shape, cache_dtype or dtype) for shape in (key, key, cache, cache)]
    arrays += [jax.ShapeDtypeStruct(shape, "int32") for shape in ((), (batch,))]
    more = [jax.ShapeDtypeStruct((), "bool"), jax.ShapeDtypeStruct((heads,), "float32")]
    operands = AttendOne(*arrays, *(more if has_window else ()))
    lower(kernels_of(ATTEND_ONE, scale=0.1, window=128 if has_window else None, layout=layout), operands)


def lower_delta_rule(features, dtype):
    """The gated delta rule of packed sequences and its gradients, of tokens in order, and of one token."""
    batch, length, key_heads, heads, layers = 2, 1000, 2, 4, 3
    arrays = [((key_heads, features), dtype)] * 2 + [((heads, features), dtype)] + [((heads,), "float32")] * 2
    of_tokens = [jax.ShapeDtypeStruct((batch, length, *shape), kind) for shape, kind in arrays]
    of_one = [jax.ShapeDtypeStruct((batch, *shape), kind) for shape, kind in arrays]
    state = jax.ShapeDtypeStruct((batch, heads, features, features), "float32")
    operands = DeltaRule(*of_tokens, state, jax.ShapeDtypeStruct((batch, length), "bool"))
    states = jax.ShapeDtypeStruct((layers, *state.shape), "float32")
    options = {"scale": 0.1, "epsilon": 1e-6}
    forward = kernels_of(DELTA_RULE, keeps=True, **options)
    y, last_state, *kept = jax.eval_shape(forward, operands)
    lower(forward, operands)
    lower(kernels_of(DELTA_RULE_BACKWARD, **options), DeltaRuleBackward(*operands, *kept, y, last_state))
    in_stack = states, jax.ShapeDtypeStruct((), "int32")
    lower(kernels_of(DELTA_RULE_IN_ORDER, keeps=True, **options), DeltaRuleInOrder(*of_tokens, *in_stack))
    lower(kernels_of(DELTA_RULE_ONE, **options), DeltaRuleOne(*of_one, *in_stack))


def lower_attend_latents(heads, rank, rest, dtype):
    """Attention to latents, of one token and of several to a cache, and of packed sequences."""
    query, cache = (3, heads, rank + rest), (2, 3, 1000, 1, rank + rest)
    q, latents = (jax.ShapeDtypeStruct(shape, dtype) for shape in (query, cache))
    scalar, positions, starts = (jax.ShapeDtypeStruct(shape, "int32") for shape in ((), (3,), (3, 100)))
    options = {"scale": 0.1, "rank": rank}
    lower(kernels_of(ATTEND_LATENTS_ONE, **options), AttendLatentsOne(q, latents, scalar, positions))
    q = jax.ShapeDtypeStruct((3, 100, *query[1:]), dtype)
    for places in ((scalar, scalar), (None, None, starts)):
        lower(kernels_of(ATTEND_LATENTS, **options), AttendLatents(q, latents, *places))


def lower_project_few(rows, features, dtype):
    """Queries, keys and values of few tokens, with biases and without; of more tokens, with terms of low rank."""
    columns = 4096, 512, 512
    x = jax.ShapeDtypeStruct((rows, features), dtype)
    matrices = [jax.ShapeDtypeStruct((features, size), dtype) for size in columns]
    biases = [jax.ShapeDtypeStruct((size,), dtype) for size in columns] if rows > 1 else []
    operands = ProjectFew(x, *matrices, *biases)
    if rows > MOST_ROWS:
        shapes = (rows, 48), *((16, size) for size in columns)
        low = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        operands = operands._replace(**dict(zip(("low_rows", "low_q", "low_k", "low_v"), low, strict=True)))
    lower(kernels_of(PROJECT_FEW), operands)


def lower_symmetric(groups, size, reduced, dtype, out_dtype, precision=None, config=None):
    """A symmetric product with another matrix added."""
    left, add = (jax.ShapeDtypeStruct((*groups, size, columns), dtype) for columns in (reduced, size))
    options = {"config": config, "dtype": jnp.dtype(out_dtype), "precision": as_precision(precision)}
    lower(kernels_of(SYMMETRIC, **options), Symmetric(left, jax.ShapeDtypeStruct((3,), "float32"), left, add))


def lower_hopper_symmetric(*case):
    """The same by the kernel for Hopper."""
    lower_symmetric(*case, config=hopper_config(CONFIG_TYPES["forward"], "enk"))


def lower_stored(kind, w_layout, rows):
    """A product that gathers few rows, or many, of weights in MXFP4 or FP8 that is not multiplied in FP8."""
    in_features, out_features = 2880, 5760
    arrays, static = arguments(rows, in_features, out_features, w_layout, "up", "bfloat16", None)
    floats = {key: arrays.pop(key) for key in ("x", "w", "topk_weights", "bias")}
    axis = 1 if w_layout == "ekn" else 2
    values, scales = ([*floats["w"].shape] for _ in range(2))
    if kind == "packed":
        values[axis] //= 2
        scales[axis] //= 32
        dtypes = "uint8", "uint8"
    else:
        scales[1:] = [-(-size // 128) for size in scales[1:]]
        dtypes = "float8_e4m3fn", "float32"
    w = jgg.QuantizedArray(*map(jax.ShapeDtypeStruct, (tuple(values), tuple(scales)), dtypes))
    problem = check_problem(**floats, **arrays, **static)

    def compute(x, w, group_sizes, gather_indices):
        bounds = group_bounds(group_sizes, problem.num_rows)
        return kernels_of(FORWARD, problem=problem)(Forward(x, w, bounds, gather_indices))

    lower(compute, floats["x"], w, *arrays.values())
