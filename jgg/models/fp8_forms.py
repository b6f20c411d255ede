"""The FP8 forms of experts' weights that generation reads, made once and kept as long as the weights."""

import functools
import weakref
from typing import NamedTuple

import jax
from jax.core import Tracer
from jax.typing import DTypeLike

from jgg.core.gpu_target import current_target
from jgg.core.quantized import WeightForms
from jgg.extend import How
from jgg.linear.fp8 import Fp8
from jgg.linear.weights import Weights, forms_of_forward
from jgg.models.layer import Layer
from jgg.models.modules import Options
from jgg.nnx import Frozen


class _Kept(NamedTuple):
    """Forms, and the arrays that they were made of."""

    sources: tuple[weakref.ref[jax.Array], ...]
    forms: WeightForms

    @property
    def is_current(self) -> bool:
        """Whether the arrays are there; a step of training may have been given their memory."""
        sources = (source() for source in self.sources)
        return all(source is not None and not source.is_deleted() for source in sources)


_KEPT: dict[tuple[object, ...], _Kept] = {}  # by how they were made, and the ids of the arrays


def put_forms(layers: Layer, options: Options) -> None:
    """Puts what forward products read in place of experts' weights that a recipe multiplies in FP8.

    Making it for each token would mean reading all experts, whichever ones the token chose. A sharded model does so.
    For trained weights it takes one more byte per weight, and is kept as long as the weights: see `kept_forms`.
    """
    recipe = layers.moe.quantization if hasattr(layers, "moe") else None
    if recipe is None or options.sharding is not None:
        return
    how = How(options.implementation, current_target())
    for name in ("w_gate_up", "w_down"):
        weights = getattr(layers.moe, name).get_value()
        if isinstance(weights, WeightForms):
            continue
        setattr(layers.moe, name, Frozen(kept_forms(name, weights, recipe, options.dtype, how)))


def kept_forms(name: str, weights: Weights, recipe: Fp8, dtype: DTypeLike, how: How) -> WeightForms:
    """What `forms_of_forward` returns, the same arrays for the same weights; the arguments are its own.

    An array never changes its values, so forms are right for as long as the arrays that they were made of are there.
    They are freed with the first of these. Nothing is kept of NumPy arrays, which may change, nor of traced ones.
    """
    sources = jax.tree.leaves(weights)
    for key in [key for key, kept in list(_KEPT.items()) if not kept.is_current]:
        _KEPT.pop(key, None)
    key = recipe, dtype, how, *map(id, sources)
    kept = _KEPT.get(key)
    if kept is not None:
        return kept.forms
    if not all(map(_has_values, sources)):
        return forms_of_forward(name, weights, recipe, dtype, how)
    make = functools.partial(forms_of_forward, name, recipe=recipe, dtype=dtype, how=how)
    # not tuned: XLA would try each way to transpose all experts, and there may be no memory for the arrays of a trial
    untuned = {"xla_gpu_autotune_level": "0"}
    forms: WeightForms = jax.jit(make).lower(weights).compile(compiler_options=untuned)(weights)
    ends = functools.partial(_forget, key)
    _KEPT[key] = _Kept(tuple(weakref.ref(source, ends) for source in sources), forms)
    return forms


def _forget(key: tuple[object, ...], _: object) -> None:
    _KEPT.pop(key, None)


def _has_values(array: object) -> bool:
    return isinstance(array, jax.Array) and not isinstance(array, Tracer)
