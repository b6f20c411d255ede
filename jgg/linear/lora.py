"""The LoRA adapters of a layer: their options, names and shapes, and the low-rank terms made from them."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import Initializer

from jgg.core.arguments import HasShape, as_finite, as_int, check, check_instance
from jgg.core.choices import OF_EXPERTS
from jgg.core.matrix import Matrix
from jgg.linear.low_rank import LowRank, factors_of


@dataclasses.dataclass(frozen=True)
class Lora:
    """The options of a layer's adapters.

    Attributes:
      rank, alpha, targets: `lora_rank`, `lora_alpha` and `lora_targets` of `LayerOptions`. Once `checked`, there is an
        alpha if there is a rank. A tuple has one number per target.
    """

    rank: int | tuple[int, ...] | None
    alpha: float | tuple[float, ...] | None
    targets: tuple[str, ...]

    @classmethod
    def of_layer(cls, options: object) -> Self:
        """The options from a layer's fields."""
        return cls(*(getattr(options, f"lora_{field.name}") for field in dataclasses.fields(cls)))

    @classmethod
    def of_terms(cls, terms: Iterable[tuple[str, LowRank]]) -> Self:
        """Options for adapters that have room for all of these terms, each given with its target.

        A target's rank is the largest rank of its terms, and its scale is the first term's.
        """
        by_target: dict[str, list[LowRank]] = {}
        for target, term in terms:
            by_target.setdefault(target, []).append(term)
        ranks = tuple(max(term.a.shape[-1] for term in own) for own in by_target.values())
        scales = (own[0].scale for own in by_target.values())
        alphas = tuple(scale * rank for scale, rank in zip(scales, ranks, strict=True))
        return cls(
            ranks[0] if len(set(ranks)) == 1 else ranks,
            alphas[0] if len(set(alphas)) == 1 else alphas,
            tuple(by_target),
        )

    @property
    def of_a_layer(self) -> dict[str, Any]:
        """These options as fields of a layer."""
        return {f"lora_{name}": value for name, value in vars(self).items()}

    def checked(self, known: tuple[str, ...] = OF_EXPERTS) -> Self:
        """The options, checked; raises if one is wrong, or if a target is not among the `known` ones."""
        rank, alpha, targets = self.rank, self.alpha, self.targets
        expected = f"a tuple of one or both of {known}" if len(known) == 2 else f"a tuple of some of {known}"
        check_instance("lora_targets", targets, tuple | list | str, expected)
        assert isinstance(targets, tuple | list | str)
        names: tuple[str, ...] = () if isinstance(targets, str) else tuple(targets)
        is_choice = names and all(name in known and names.count(name) == 1 for name in names)
        check(is_choice, f"lora_targets must be {expected}, got {targets!r}.")
        for name, value in (("lora_rank", rank), ("lora_alpha", alpha)):
            check(
                not isinstance(value, tuple | list) or len(value) == len(names),
                f"{name} must be a number or one for each of lora_targets, {names}, got {value!r}.",
            )
        if rank is None:
            check(alpha is None, f"lora_alpha must be None without a lora_rank, got {alpha!r}.")
            return dataclasses.replace(self, targets=names)
        own = _each(lambda value: as_int("lora_rank", value, 1, "None or a positive int"), rank)
        scales = _each(lambda value: as_finite("lora_alpha", value), alpha) if alpha is not None else _each(float, own)
        return dataclasses.replace(self, rank=own, alpha=scales, targets=names)

    @property
    def ranks(self) -> dict[str, int]:
        """The rank of each target; empty without a rank."""
        return {} if self.rank is None else dict(zip(self.targets, self._of_each(self.rank), strict=True))

    @property
    def scales(self) -> dict[str, float]:
        """The scale of each target's term, alpha / rank; empty without a rank."""
        alphas = zip(self.ranks.items(), self._of_each(self.alpha), strict=False)
        return {name: alpha / rank for (name, rank), alpha in alphas}

    def _of_each[Value: (int, float)](self, value: Value | tuple[Value, ...] | None) -> tuple[Value, ...]:
        if value is None:
            return ()
        return value if isinstance(value, tuple) else (value,) * len(self.targets)

    def of(self, names: Mapping[str, str]) -> Self:
        """The options for the targets that `names` has, each renamed to the name given there."""
        there = [index for index, target in enumerate(self.targets) if target in names]
        if self.rank is None or not there:
            return type(self)(None, None, ())
        rank, alpha = self.rank, self.alpha
        rank = tuple(rank[index] for index in there) if isinstance(rank, tuple) else rank
        alpha = tuple(alpha[index] for index in there) if isinstance(alpha, tuple) else alpha
        return type(self)(rank, alpha, tuple(names[self.targets[index]] for index in there))

    def shapes(self, weights: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The shapes of a and b by name, for the weights, [E, K, N] or [K, N], that are targets."""
        shapes: dict[str, tuple[int, ...]] = {}
        for target, rank in self.ranks.items():
            if target in weights:
                *experts, rows, columns = weights[target]
                shapes |= {name: (*experts, *own) for name, own in adapter_axes(target, (rows, columns), rank).items()}
        return shapes

    def matrix(self, target: str, params: Mapping[str, jax.Array]) -> Matrix:
        """Dense weights of this name with their term, if they have one; they keep their gradient."""
        matrix = Matrix(dense=params[target])
        own = self.of({target: target}).terms(params)
        return matrix._replace(factors=factors_of(own[target])) if own else matrix

    def terms(self, params: Mapping[str, jax.Array]) -> dict[str, LowRank]:
        """The terms by the names of their weights."""
        pairs = {target: adapter_names(target) for target in self.ranks}
        return {target: LowRank(params[a], params[b], self.scales[target]) for target, (a, b) in pairs.items()}

    def check_merged(self, params: Mapping[str, jax.Array]) -> None:
        """Raises unless all adapters are merged, as `merge` leaves them."""
        for target, term in self.terms(params).items():
            name = adapter_names(target)[1]
            check(not jnp.any(term.b), f"{name} must be zero, as merge_adapters() leaves it, to be saved.")

    def merge(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The parameters with each term merged into its weights, [E, K, N] or [K, N], and its b zero."""
        merged = dict(params)
        for target, term in self.terms(params).items():
            w = params[target]
            check_instance(target, w, jax.Array | np.ndarray, "a float array, to be merged into")
            if w.ndim == 3:
                own = term.merge(w, "ekn")
            else:
                own = LowRank(term.a[None], term.b[None], term.scale).merge(w[None], "ekn")[0]
            merged |= {target: own, adapter_names(target)[1]: jnp.zeros_like(term.b)}
        return merged


def _each(convert: Callable[[Any], Any], value: Any) -> Any:
    """The value, or each of a tuple or list, converted."""
    return tuple(map(convert, value)) if isinstance(value, tuple | list) else convert(value)


def adapter_init(name: str, w: HasShape) -> Initializer:
    """The initializer of a or b for weights w [..., K, N]; for a, as in Flax's nnx.LoRA, matrix by matrix.

    b is zero, so that a new adapter changes nothing.
    """
    if name.endswith("_b"):
        return jax.nn.initializers.zeros
    return jax.nn.initializers.he_uniform(batch_axis=tuple(range(len(w.shape) - 2)))


def adapter_names(target: str) -> tuple[str, str]:
    """The names of a and b for the weights of this name."""
    return f"{target}_lora_a", f"{target}_lora_b"


def target_of(name: str) -> str:
    """The name of the weights that an adapter of this name is for."""
    return name.partition("_lora_")[0]


def adapter_axes[Axis](target: str, axes: tuple[Axis, Axis], own: Axis) -> dict[str, tuple[Axis, ...]]:
    """The axes of a and b, by name: each has one axis of the weights [K, N], and `own` for r."""
    (a, b), (rows, columns) = adapter_names(target), axes
    return {a: (rows, own), b: (own, columns)}
