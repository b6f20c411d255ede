"""Lets an optax optimizer keep its moments in 8 bits."""

import itertools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from jgg.core.arguments import check, check_instance
from jgg.core.rounding import mixed
from jgg.extend import barrier
from jgg.optim.eight_bits import Code, block_of, decoded, encoded, exponents_of, sharding_of_blocks

_LEAST_SIZE = 4096  # elements, as in bitsandbytes; smaller arrays, such as biases, would save nothing

type Path = tuple[Any, ...]
type Own = jax.Array | optax.MaskedNode  # the exponents of an array in 8 bits


class _Moment(NamedTuple):
    """An array of a state: how it is encoded, and the path of its parameter."""

    code: Code
    parameter: Path


class EightBitState(NamedTuple):
    """The state of `states_in_8_bits`.

    Attributes:
      step: int32 [], number of updates so far.
      inner: the state of the wrapped optimizer; its large moments are uint8 arrays of the same shapes.
      exponents: uint8 [..., N / block] for each of these arrays [..., N], `optax.MaskedNode()` for all others.
    """

    step: jax.Array
    inner: optax.OptState
    exponents: optax.OptState


def states_in_8_bits(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    *,
    signed: Collection[str] = ("mu", "trace"),
    non_negative: Collection[str] = ("nu",),
) -> optax.GradientTransformationExtraArgs:
    """Keeps an optimizer's moments in 8 bits: AdamW's take about 2 bytes per parameter rather than 8, Muon's 1 than 4.

    Each update decodes the moments, lets the optimizer update them in their own dtype, and encodes them again. Blocks
    of at most 128 elements of the last axis share a power of two, and an element is relative to it: a float of 4
    significant bits, with a sign and 4 bits of exponent in a first moment and 5 bits of exponent in a second. The
    momentum of optimizers without a second moment, such as Muon, is an integer: its error is a third of a float's.

    - Rounding is stochastic. With `b2=0.999` an update changes a second moment by about 0.1%, much less than half the
      distance of two 8-bit numbers: rounded to nearest, it would never change. Noise is a hash of the number of
      updates and of an element's place, so the same run gives the same bits.
    - AdamW divides by the square root of the second moment. One that is not 0 stays so: it is at least 2**-32 of its
      block's largest. The least first moment other than 0 is below 2**-16 of its block's largest. So rounding a first
      moment up moves an element no further than the largest first moment, divided by the largest root, would.

    Arrays keep their axes, so codes can be sharded like their parameter, and a layer of the state is a slice. Where
    something is not finite, its whole block becomes so.

    Examples:
      >>> import jgg, jgg.optim, optax
      >>> optimizer = jgg.optim.states_in_8_bits(optax.adamw(1e-4))
      >>> params = {"w": jnp.ones((64, 128))}
      >>> state = optimizer.init(params)
      >>> sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / params["w"].size < 2.2
      True

    Args:
      optimizer: the optax optimizer, such as `optax.adamw` or `jgg.optim.muon`, also in `optax.chain` and with
        clipping.
      signed: fields of the optimizer's states with an array per parameter, to keep in 8 bits. Only arrays of the
        parameter's shape with at least 4,096 elements are, if their last axis divides into blocks of 8 to 128.
      non_negative: further such fields, without negative numbers; a negative one makes its block infinite. It must have
        the second moment that a signed field is divided by: in float32 that may be too small for a rounded numerator.

    Returns:
      An optax optimizer. In `float32_masters(states_in_8_bits(...))` the masters stay float32.

    Raises:
      TypeError: the optimizer is none of optax, or fields are no collection of names.
      ValueError: a field is both signed and non-negative; in `init`, the optimizer's state has none of the fields, or
        the optimizer subtracts moments, as `optax.rmsprop(centered=True)` does: it may round to less than 0.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021, https://arxiv.org/abs/2110.02861,
      where 8-bit numbers come from a table and are rounded to nearest.
    """
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    check_instance("optimizer", optimizer, optax.GradientTransformation, "an optimizer of optax")
    is_signed = _fields("signed", signed, True) | _fields("non_negative", non_negative, False)
    twice = set(signed) & set(non_negative)
    check(not twice, f"signed and non_negative must be of different fields, got {', '.join(sorted(twice))} in both.")
    inner = optax.with_extra_args_support(optimizer)

    def first(params: optax.Params) -> EightBitState:
        own = inner.init(params)
        moments = _moments(own, is_signed)
        are_subtracted = any(map(_is_centered, jax.tree.leaves(own, is_leaf=_is_centered)))
        check(not are_subtracted, "optimizer must not take a difference of moments, got a centered one.")
        shapes = {path: jnp.shape(leaf) for path, leaf in jax.tree.leaves_with_path(params)}
        check(
            bool(moments) or not shapes, f"optimizer must have a state with a field {' or '.join(is_signed)}, got none."
        )

        def exponents_at(path: Path, array: jax.Array) -> jax.Array | optax.MaskedNode:
            if path not in moments or shapes.get(moments[path].parameter) != array.shape or not _fits(array):
                return optax.MaskedNode()
            array += barrier(jnp.zeros((), array.dtype))  # else XLA computes with constants while it compiles
            return exponents_of(array, moments[path].code)

        exponents, count = jax.tree.map_with_path(exponents_at, own), jnp.zeros((), jnp.int32)
        return EightBitState(count, _encoded(own, exponents, count, moments), exponents)

    def init(params: optax.Params) -> EightBitState:
        if any(isinstance(leaf, Tracer | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            return first(params)
        # compiled, so that the moments are not all there in float32 first
        state = jax.eval_shape(first, params)
        return jax.jit(first, out_shardings=_shardings(state, params, _moments(state.inner, is_signed)))(params)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: object
    ) -> tuple[optax.Updates, EightBitState]:
        types = jax.eval_shape(inner.init, updates if params is None else params)
        moments = _moments(state.inner, is_signed)

        def step(own: optax.OptState, exponents: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
            return inner.update(updates, _decoded(own, exponents, types, moments), params, **extra)

        def exponents_at(path: Path, array: jax.Array, old: Own) -> Own:
            return old if isinstance(old, optax.MaskedNode) else exponents_of(array, moments[path].code)

        # XLA would write new moments to memory between their exponents and their codes, so both compute them
        exponents = jax.tree.map_with_path(exponents_at, step(state.inner, state.exponents)[1], state.exponents)
        exponents, own = barrier((exponents, (state.inner, state.exponents)))
        updates, new = step(*own)
        count = jnp.asarray(optax.safe_increment(state.step))
        return updates, EightBitState(count, _encoded(new, exponents, count, moments), exponents)

    return optax.GradientTransformationExtraArgs(init, update)


def _decoded(
    state: optax.OptState, exponents: optax.OptState, types: optax.OptState, moments: Mapping[Path, _Moment]
) -> optax.OptState:
    """The state of the wrapped optimizer, with arrays of these types in place of codes."""

    def array_at(path: Path, codes: jax.Array, own: Own, like: jax.ShapeDtypeStruct) -> jax.Array:
        return (
            codes if isinstance(own, optax.MaskedNode) else decoded(codes, own, moments[path].code).astype(like.dtype)
        )

    return jax.tree.map_with_path(array_at, state, exponents, types)


def _encoded(
    state: optax.OptState, exponents: optax.OptState, count: jax.Array, moments: Mapping[Path, _Moment]
) -> optax.OptState:
    """The state of the wrapped optimizer, with codes in place of the arrays that have exponents."""
    numbers = itertools.count()

    def codes_at(path: Path, array: jax.Array, own: Own) -> jax.Array:
        salt = mixed(count.astype(jnp.uint32) ^ mixed(jnp.uint32(next(numbers))))
        return array if isinstance(own, optax.MaskedNode) else encoded(array, own, salt, moments[path].code)

    return jax.tree.map_with_path(codes_at, state, exponents)


def _fields(name: str, fields: Collection[str], signed: bool) -> dict[str, bool]:
    is_right = isinstance(fields, Collection) and not isinstance(fields, str)
    if not is_right or not all(isinstance(field, str) for field in fields):
        raise TypeError(f'{name} must be a collection of names of fields, such as ("mu",), got {fields!r}.')
    return dict.fromkeys(fields, signed)


def _is_centered(state: object) -> bool:
    return isinstance(state, optax.ScaleByRStdDevState)


def _fits(array: jax.Array) -> bool:
    """Whether an array is kept in 8 bits."""
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return is_float and array.ndim > 0 and array.size >= _LEAST_SIZE and block_of(array.shape[-1]) is not None


def _moments(state: optax.OptState, is_signed: Mapping[str, bool]) -> dict[Path, _Moment]:
    """What a state has for parameters in fields of these names, by path."""
    fields: dict[Path, int] = {}  # where the field is in the path
    for path, _ in jax.tree.leaves_with_path(state):
        names = [key.name if isinstance(key, jax.tree_util.GetAttrKey) else None for key in path]
        at = next((at for at, name in enumerate(names) if name in is_signed), None)
        if at is not None:
            fields[path] = at
    divided = {path[:at] for path, at in fields.items() if not is_signed[path[at].name]}

    def code_of(path: Path, at: int) -> Code:
        if not is_signed[path[at].name]:
            return Code.POSITIVE
        return Code.FLOAT if path[:at] in divided else Code.EVEN

    return {path: _Moment(code_of(path, at), path[at + 1 :]) for path, at in fields.items()}


def _shardings(state: EightBitState, params: optax.Params, moments: Mapping[Path, _Moment]) -> object:
    """Where a state's arrays are: as their parameter, all others whole; None where no mesh splits parameters."""
    places: dict[Path, object] = {
        path: getattr(leaf, "sharding", None) for path, leaf in jax.tree.leaves_with_path(params)
    }
    mesh = next((place.mesh for place in places.values() if isinstance(place, jax.NamedSharding)), None)
    if mesh is None:
        return None
    whole: Any = jax.NamedSharding(mesh, jax.P())
    shapes = {path: jnp.shape(leaf) for path, leaf in jax.tree.leaves_with_path(params)}

    def place_of(path: Path, leaf: jax.ShapeDtypeStruct) -> object:
        own = moments[path].parameter if path in moments else None
        return places[own] if own in places and shapes[own] == leaf.shape else whole

    inner = jax.tree.map_with_path(place_of, state.inner)

    def of_exponents(codes: jax.ShapeDtypeStruct, place: object, exponents: Own) -> object:
        if isinstance(exponents, optax.MaskedNode) or not isinstance(place, jax.NamedSharding):
            return exponents if isinstance(exponents, optax.MaskedNode) else place
        return sharding_of_blocks(place, len(codes.shape), exponents.shape[-1])

    exponents = jax.tree.map(of_exponents, state.inner, inner, state.exponents)
    return state._replace(step=whole, inner=inner, exponents=exponents)
