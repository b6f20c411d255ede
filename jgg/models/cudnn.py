"""cuDNN's flash attention with its statistics, and its backward pass for a result and statistics that are given.

JAX's public `jax.nn.dot_product_attention` has no backward pass for a result and statistics that were changed or kept.
So this module binds the two primitives below it, which are private. It was tested with JAX 0.11.1, 0.11.2 and 0.12.0.1.
With a JAX where a primitive is missing or has other parameters, `is_available` is False, and `jgg.models.attend` calls
the public function.
"""

import functools
import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp

_jax: Any
try:
    _jax = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
except ImportError:
    _jax = None

_ARRAYS = (
    *("query", "key", "value", "bias"),
    *("q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v"),
)
_OF_BACKWARD = "activation", "fwd_output", "grad_output"
_OPTIONS = {"scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length"}
_NEW_OPTIONS = {"score_mod", "score_mod_args"}  # of JAX 0.12: None and ()


@functools.cache
def is_available() -> bool:
    """Whether this JAX has the private primitives as they were tested."""
    forward, backward = (_parameters(f"_dot_product_attention_{name}_impl") for name in ("fwd", "bwd"))
    names = (
        "_dot_product_attention_fwd_p_wrapper",
        "_dot_product_attention_bwd_p_wrapper",
        "MaskType",
        "AttentionLayout",
    )
    return (
        all(hasattr(_jax, name) for name in names)
        and _are_as_tested(forward, _ARRAYS, _OPTIONS | {"is_training"})
        and _are_as_tested(backward, (*_ARRAYS, *_OF_BACKWARD), _OPTIONS)
    )


@functools.cache
def takes_unequal_heads() -> bool:
    """Whether this cuDNN takes values of fewer features than queries and keys have, on Hopper: from 9.10 on."""
    return is_available() and hasattr(_jax, "check_cudnn_version") and _jax.check_cudnn_version() >= 91000


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Attends causally, or by a bias without causality.

    Args:
      q, k, v: [B, S, heads or kv heads, D], bfloat16 or float16; v may have fewer features if `takes_unequal_heads`.
      bias: [B, 1, queries, keys], what is added to the scaled products, in their dtype; None for causal attention.
      scale: factor of the products of queries and keys.
    Returns: the result [B, S, heads, D of v], and the logarithm of the sum in each softmax, float32 [B, heads, S].
    """
    arrays, options = _arguments(q, bias, scale)
    return tuple(_jax._dot_product_attention_fwd_p_wrapper.bind(q, k, v, *arrays, is_training=True, **options))


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    scale: float,
    y: jax.Array,
    log_sums: jax.Array,
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v for the gradient dy of a result y.

    With p = exp(scale q k + bias - log_sums), they follow from the gradient p (dy v - dy y) of the logits.
    """
    arrays, options = _arguments(q, bias, scale)
    return tuple(_jax._dot_product_attention_bwd_p_wrapper.bind(q, k, v, *arrays, log_sums, y, dy, **options))


def _arguments(q: jax.Array, bias: jax.Array | None, scale: float) -> tuple[list[jax.Array], dict[str, Any]]:
    """What both primitives take beside q, k and v: arrays by place, options by name."""
    unused = jnp.zeros(0, q.dtype)
    options = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, False),  # whether there is a bias, and whether it needs a gradient
        "mask_type": _jax.MaskType.CAUSAL if bias is None else _jax.MaskType.NO_MASK,
        "layout": _jax.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
    if "score_mod" in _parameters("_dot_product_attention_fwd_impl"):
        options["score_mod"] = None
    return [unused if bias is None else bias, *[unused] * (len(_ARRAYS) - 4)], options


def _parameters(name: str) -> tuple[str, ...]:
    function = getattr(_jax, name, None)
    return tuple(inspect.signature(function).parameters) if callable(function) else ()


def _are_as_tested(parameters: tuple[str, ...], arrays: tuple[str, ...], options: set[str]) -> bool:
    others = set(parameters[len(arrays) :])
    return parameters[: len(arrays)] == arrays and others in (options, options | _NEW_OPTIONS)
