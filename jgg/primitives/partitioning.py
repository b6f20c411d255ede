"""Primitives on arrays that plain `jax.jit` splits over devices: each device computes its part, or they are refused.

Every axis of an operand or result has a letter. Axes of features and experts may be split: each device then computes
its part, and a sum over such an axis is completed by a sum over the devices. The weights decide which axes are split:
they stay where they are, and features of rows and of a bias are sent to the devices that need them. Rows may not be
split, since which expert a row belongs to depends on all of them: to compute anyway, XLA would gather the rows on every
device, and on a mesh with FSDP the weights too.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jgg.core.manual_axes import alike
from jgg.core.quantized import is_quantized
from jgg.core.schedule import GroupBounds, Rows
from jgg.primitives.primitive import define_primitive
from jgg.primitives.splits import Names, Split

ROWS, WHOLE = ".", "_"
type Params = dict[str, Hashable]
type Function = Callable[..., Sequence[jax.Array]]
type Localize = Callable[[Params, dict[str, int]], Params]
WAY_OUT = (
    "Give the layer a jgg.sharding.MoESharding, or call jgg.sharding.sharded_moe_mlp, or call jgg's functions inside "
    "jax.shard_map, on each device's own rows."
)


class Axes(NamedTuple):
    """The letters of a primitive's axes: ROWS for an axis of rows, WHOLE for an axis that every device has whole.

    Attributes:
      operands: the letters of each operand, such as ".k" for x and "enk" for w.
      results: the letters of each result, optional ones last; a call may have fewer results than that.
      summed: for each result the letters that it is a sum over.
      localize: (parameters, number of devices by letter) -> parameters of one device's part.
      added: index of an operand that is added to a product; where devices sum the product, only one adds it.
      by_callback: whether a host callback computes the primitive. JAX does not find callbacks in what
        custom_partitioning lowers, so XLA gathers the operands for the callback; those that must not be split are
        refused.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    summed: tuple[str, ...]
    localize: Localize
    added: int | None = None
    by_callback: bool = False


class Letters(NamedTuple):
    """The letters of the axes of a NamedTuple of operands, each an array, GroupBounds, Rows or None.

    Attributes:
      operands: by name, the letters of an array or of the array in Rows; None for an array that has only axes of rows.
      results, summed: as in Axes.
    """

    operands: Mapping[str, str | None]
    results: tuple[str, ...]
    summed: tuple[str, ...]

    def axes(self, operands: NamedTuple, localize: Localize, by_callback: bool = False) -> Axes:
        """The Axes of the arrays in `operands`; an operand named bias is taken to be added to a product."""
        letters: list[str] = []
        added = None
        for name, part in operands._asdict().items():
            if name == "bias" and part is not None:
                added = len(letters)
            letters += _letters_of(part, self.operands.get(name))
        return Axes(tuple(letters), self.results, self.summed, localize, added, by_callback)


def _letters_of(part: Any, letters: str | None) -> list[str]:
    """The letters of each array of an operand."""
    if part is None:
        return []
    if isinstance(part, GroupBounds):
        return ["e" * array.ndim for array in jax.tree.leaves(part)]
    if is_quantized(part):  # it is not split: several devices dequantize it and split the result
        return [WHOLE * array.ndim for array in jax.tree.leaves(part)]
    if isinstance(part, Rows):
        return [*_letters_of(part.array, letters), *([] if part.at is None else [ROWS])]
    return [ROWS * part.ndim if letters is None else letters]


def define_partitioned(
    name: str,
    out_types: Function,
    compute: Function,
    axes_of: Callable[..., Axes | None],
    *,
    jvp: Callable[..., object],
    transpose: Callable[..., object] | None = None,
    merge_batch: Callable[..., Sequence[jax.Array] | None] | None = None,
    several: Function | None = None,
) -> tuple[Primitive, Callable[..., list[jax.Array]]]:
    """A primitive for one device, and a function that binds it or, outside shard_map, one for any number of devices.

        bind --- inside shard_map ----------------------------------> {name}_on_device
          `----- {name}, which is lowered:
                   |--- with Axes, by custom_partitioning ----------> {name}_on_device, of a device's part
                   |--- without, for one device --------------------> {name}_on_device
                   `--- without, for several devices ---------------> several, by primitives with Axes

    Args:
      name, out_types, compute, jvp, transpose, merge_batch: as in `define_primitive`.
      axes_of: (*operands, **parameters) -> Axes, or None for operands that several devices compute by `several`.
      several: (*operands, **parameters) -> results, by primitives that have Axes.
    """
    on_device = define_primitive(
        f"{name}_on_device", out_types, compute, jvp=jvp, transpose=transpose, merge_batch=merge_batch
    )

    def compute_anywhere(*operands: jax.Array, **params: Hashable) -> Sequence[jax.Array]:
        axes = axes_of(*operands, **params)
        if axes is None:
            assert several is not None
            return several(*operands, **params)
        if axes.by_callback:
            return on_device.bind(*_refuse_or_pass(axes, operands), **params)
        count = len(out_types(*operands, **params))
        axes = axes._replace(results=axes.results[:count], summed=axes.summed[:count])
        return _partitioned(on_device.bind, params, axes)(*operands)

    anywhere = define_primitive(
        name,
        _without_needs_devices(out_types),
        _without_needs_devices(compute_anywhere),
        jvp=_without_needs_devices(jvp),
        transpose=transpose and _without_needs_devices(transpose),
        merge_batch=merge_batch and _without_needs_devices(merge_batch),
    )

    def lower(context: mlir.LoweringRuleContext, *operands: object, **params: Hashable) -> Any:
        is_alone = getattr(context.module_context.axis_context, "num_devices", 1) == 1
        needs_no_axes = is_alone and _without_needs_devices(axes_of)(*context.avals_in, **params) is None
        compute = on_device.bind if needs_no_axes else compute_anywhere
        return mlir.lower_fun(_without_needs_devices(compute), multiple_results=True)(context, *operands, **params)

    if several is not None:
        mlir.register_lowering(anywhere, lower)

    def bind(*operands: jax.Array, **params: Hashable) -> list[jax.Array]:
        arrays = alike(operands)
        if jax.sharding.get_abstract_mesh().manual_axes:
            # inside shard_map each device computes with its own arrays; such a program may be lowered without devices
            return on_device.bind(*arrays, **params)
        for operand in arrays:
            spec = jax.typeof(operand).sharding.spec
            if any(names is not None for names in spec):
                raise ValueError(
                    f"An array {list(operand.shape)} is split over Explicit axes of the mesh, as {spec}. {WAY_OUT}"
                )
        return anywhere.bind(*arrays, needs_devices=_needs_devices(), **params)

    return on_device, bind


def _without_needs_devices[Result](rule: Callable[..., Result]) -> Callable[..., Result]:
    """A rule of {name}_on_device as a rule of {name}, which has one parameter more."""
    return lambda *args, needs_devices, **params: rule(*args, **params)


@functools.cache
def _needs_devices() -> Hashable:
    """A program that uses custom_partitioning; as a parameter of a primitive it makes JAX lower that for its devices.

    The primitive's lowering uses custom_partitioning too, but JAX decides before it lowers, by the parameters alone.
    """
    identity = _partitioned(lambda x: (x,), {}, Axes(("",), ("",), ("",), lambda params, devices: params))
    return jax.make_jaxpr(identity)(jnp.float32(0))


def _partitioned(bind: Function, params: Params, axes: Axes) -> Function:
    """A function of operands that lets each device compute bind(*operands, **parameters) for its own part."""
    call = custom_partitioning(lambda *operands: tuple(bind(*operands, **params)))
    partition = functools.partial(_partition, bind, params, axes)
    call.def_partition(partition, decode_shardings=False, sharding_rule=_sharding_rule(axes))
    return call


def _refuse_or_pass(axes: Axes, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The operands unchanged; raises ValueError if they are split in a way that is refused."""
    axes = Axes(axes.operands, axes.operands, ("",) * len(operands), lambda params, devices: params)
    return _partitioned(lambda *operands: operands, {}, axes)(*operands)


def _sharding_rule(axes: Axes) -> str:
    """Shardy's rule for spreading shardings: axes with the same letter are split alike, axes of rows independently."""
    count = itertools.count()

    def side(arrays: Sequence[str]) -> str:
        return ", ".join(" ".join(f"r{next(count)}" if c in (ROWS, WHOLE) else c for c in array) for array in arrays)

    return f"{side(axes.operands)} -> {side(axes.results)}"


def _partition(
    bind: Function,
    params: Params,
    axes: Axes,
    mesh: jax.sharding.Mesh,
    operands: Sequence[jax.ShapeDtypeStruct],
    results: Sequence[jax.ShapeDtypeStruct],
) -> tuple[jax.sharding.Mesh, Function, Sequence[jax.NamedSharding], Sequence[jax.NamedSharding]]:
    """The mesh, one device's computation, and the shardings of results and operands, as custom_partitioning wants."""
    split = split_letters(axes, *([Split.of(array, mesh) for array in arrays] for arrays in (operands, results)))
    devices = {letter: math.prod(mesh.shape[name] for name in names) for letter, names in split.items()}
    local = axes.localize(params, devices)

    def on_device(*operands: jax.Array) -> tuple[jax.Array, ...]:
        arrays = list(operands)
        if axes.added is not None:
            array, letters = arrays[axes.added], axes.operands[axes.added]
            others = [name for letter, names in split.items() if letter not in letters for name in names]
            is_first = sum((jax.lax.axis_index(name) for name in others), jnp.int32(0)) == 0
            arrays[axes.added] = jnp.where(is_first, array, jnp.zeros_like(array))
        outputs = bind(*arrays, **local)
        over = [tuple(name for letter in summed for name in split.get(letter, ())) for summed in axes.summed]
        return tuple(map(jax.lax.psum, outputs, over))

    def shardings(arrays: Sequence[str]) -> Sequence[jax.NamedSharding]:
        return tuple(jax.NamedSharding(mesh, jax.P(*(split.get(c) for c in letters))) for letters in arrays)

    return mesh, _without_explicit_axes(on_device), shardings(axes.results), shardings(axes.operands)


def _without_explicit_axes(function: Function) -> Function:
    """The function, traced as if the mesh in context had no Explicit axes.

    With Explicit axes, types say how arrays are split, and JAX would lower that to annotations that nothing reads in
    the computation of one device.
    """

    def run(*arrays: jax.Array) -> Sequence[jax.Array]:
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.explicit_axes:
            return function(*arrays)
        auto = dict.fromkeys(mesh.explicit_axes, jax.sharding.AxisType.Auto)
        with jax.sharding.use_abstract_mesh(mesh.update_axis_types(auto)):
            return function(*jax.sharding.reshard(arrays, jax.P()))

    return run


def split_letters(axes: Axes, operands: Sequence[Split], results: Sequence[Split]) -> dict[str, Names]:
    """The mesh axes over which each letter is split: as in the weights or, without weights, as in the other arrays.

    Raises: ValueError: an array of rows is split over its rows, or weights are split unevenly.
    """
    arrays = [*zip(axes.operands, operands, strict=True), *zip(axes.results, results, strict=True)]
    for letters, array in arrays[: len(operands)]:
        _check_is_local(letters, array)
    split: dict[str, Names] = {}
    for letters, array in [pair for pair in arrays if _are_weights(pair[0])] or arrays:
        for axis, letter in enumerate(letters):
            names = array.names[axis]
            taken = {name for others in split.values() for name in others}
            if letter not in (ROWS, WHOLE, *split) and names and array.is_even(axis) and taken.isdisjoint(names):
                split[letter] = names
    return split


def _check_is_local(letters: str, operand: Split) -> None:
    """Raises ValueError if an operand would have to be gathered although it is too large: rows or weights."""
    if letters[:1] == ROWS and letters.strip(ROWS) and operand.ways[0] > 1:
        raise ValueError(
            f"An array of rows {list(operand.shape)} must not be split over its rows, got {operand.given}: "
            f"under jax.jit alone, grouped GEMM would have to gather it on every device. {WAY_OUT}"
        )
    if _are_weights(letters) and not all(map(operand.is_even, range(len(letters)))):
        raise ValueError(
            f"Weights {list(operand.shape)} must be split evenly, got {operand.given}: they would have to be "
            f"gathered. {WAY_OUT}"
        )
    if _are_weights(letters) and None in operand.names:
        raise ValueError(
            f"Weights {list(operand.shape)} must be split over whole axes of the mesh, got {operand.given}: they would "
            f"have to be gathered. {WAY_OUT}"
        )


def _are_weights(letters: str) -> bool:
    return len(letters) == 3
