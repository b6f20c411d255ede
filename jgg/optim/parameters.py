"""Which parameters are matrices that Muon orthogonalizes, and which of their axes are rows and columns."""

import math
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from jgg.core.arguments import check
from jgg.linear.lora import adapter_names, target_of

_OTHERS = "w_embedding", "w_head", "w_router"  # matrices by their names, which AdamW trains


def matrices(params: optax.Params) -> optax.Params:
    """The default of `muon_weight_dimension_numbers`: the matrices of jgg's models and layers, by their names.

    These are all arrays whose name begins with "w_", except "w_embedding", "w_head", "w_router" and LoRA's factors,
    whose names end with "_lora_a" and "_lora_b": experts [L, E, H, N], layers' matrices [L, H, N] and single matrices
    [H, N]. The last two axes are a matrix's, and the axes before them index the matrices of a stack. If one of the last
    two has length 1, the array holds vectors, not matrices: for example the taps of a depthwise convolution [channels,
    1, taps] or the gate of shared experts [H, 1].

    Args:
      params: a pytree of arrays, named by its dicts, including `nnx.State`.

    Returns:
      The same pytree with `MuonDimensionNumbers(-2, -1)` for each matrix and None for every other array.
    """

    def numbers(path: tuple[Any, ...], array: jax.Array) -> MuonDimensionNumbers | None:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey) and isinstance(key.key, str)]
        name = names[-1] if names else ""
        is_own = name.startswith("w_") and name not in (*_OTHERS, *adapter_names(target_of(name)))
        are_matrices = array.ndim >= 2 and 1 not in array.shape[-2:]
        return MuonDimensionNumbers(-2, -1) if is_own and are_matrices else None

    return jax.tree_util.tree_map_with_path(numbers, params)


def of_leaves(tree: object, params: optax.Params) -> list[Any]:
    """The value that a pytree, or a function that makes one from the parameters, has for each array of `params`.

    The pytree has the structure of the parameters or a prefix of it. `params` may be a part of the parameters, with the
    others masked as `optax.partition` does.
    """
    tree = tree(params) if callable(tree) else tree
    is_leaf = lambda value: value is None or isinstance(value, MuonDimensionNumbers)  # noqa: E731
    values = {_keys(path): value for path, value in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]}
    found = []
    for path in (_keys(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]):
        own = next((values[path[:length]] for length in range(len(path), -1, -1) if path[:length] in values), values)
        check(
            own is not values, f"a pytree must have a value for the parameter {jax.tree_util.keystr(path)}, got none."
        )
        found.append(own)
    return found


def _keys(path: tuple[object, ...]) -> tuple[object, ...]:
    """The path without Flax NNX variables, which states have and optimizers remove."""
    return tuple(key for key in path if key != jax.tree_util.GetAttrKey("value"))


def matrix_axes(shape: tuple[int, ...], numbers: MuonDimensionNumbers) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of an array that index a matrix's rows, which a product sums over, and its columns."""
    ndim = len(shape)
    found = []
    for axes in (numbers.reduction_axis, numbers.output_axis):
        own = (axes,) if isinstance(axes, int) else tuple(axes)
        check(all(-ndim <= axis < ndim for axis in own), f"{numbers} must name axes of a parameter {list(shape)}.")
        found.append(tuple(axis % ndim for axis in own))
    reduction, output = found
    named = (*reduction, *output)
    is_right = reduction and output and len(set(named)) == len(named)
    check(is_right, f"{numbers} must name different axes of a parameter {list(shape)} as rows and as columns.")
    return reduction, output


def shape_factor(shape: tuple[int, ...], numbers: MuonDimensionNumbers, consistent_rms: float | None) -> float:
    """What a matrix's update is multiplied by, as in optax."""
    fan_in, fan_out = (math.prod(shape[axis] for axis in axes) for axes in matrix_axes(shape, numbers))
    if consistent_rms is None:
        return math.sqrt(max(1, fan_out / max(fan_in, 1)))
    return math.sqrt(max(fan_in, fan_out)) * consistent_rms
