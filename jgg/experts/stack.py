"""The experts of several layers stacked in one array, and one layer of them, read where it is."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jgg.core.arguments import as_array, check, check_integers
from jgg.core.schedule import saturated_int32
from jgg.experts.mlp import Stack

OF_EXPERTS = "w_gate_up", "w_down", "b_gate_up", "b_down"


def layer_of_stack(params: Mapping[str, Any], stack_index: ArrayLike) -> dict[str, Any]:
    """The parameters with those of OF_EXPERTS, [L, ...], in place of the stack's.

    Raises: ValueError, TypeError: the index is no integer [], or the parameters of experts are not those of L layers.
    """
    index = as_array("stack_index", stack_index)
    check_integers("stack_index", index)
    check(index.shape == (), f"stack_index must be [], got {list(index.shape)}.")
    stacked = {name: params[name] for name in OF_EXPERTS if name in params}
    counts = {name: value.shape[0] for name, value in stacked.items() if value.shape}
    are_alike = len(set(counts.values())) == 1 and min(counts.values()) > 0
    check(are_alike, f"{', '.join(stacked)} must have as many layers, at least 1, with stack_index, got {counts}.")
    index = _within(index, min(counts.values()))
    return dict(params) | {
        name: jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, index, keepdims=False), value)
        for name, value in stacked.items()
    }


def _within(index: jax.Array, num_layers: int) -> jax.Array:
    """The index, or the nearest that there is, int32 []."""
    return jnp.clip(saturated_int32(index), 0, num_layers - 1)


def stack_of(params: Mapping[str, Any], stack_index: ArrayLike, dtype: jnp.dtype) -> Stack | None:
    """The stack that kernels can read a layer from; None if its weights are not in the dtype of their products."""
    weights = [params[name] for name in OF_EXPERTS[:2]]
    if not all(isinstance(w, jax.Array) and w.dtype == dtype for w in weights):
        return None
    num_layers, num_experts, *_ = weights[0].shape

    def merged(name: str) -> Any:
        value = params.get(name)
        return value if value is None else jnp.reshape(value, (num_layers * num_experts, *value.shape[2:]))

    first = _within(jnp.asarray(stack_index), num_layers) * num_experts
    return Stack(**{name: merged(name) for name in OF_EXPERTS}, first=first)
