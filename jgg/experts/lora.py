"""The LoRA adapters of a layer: their options, names and shapes, and the terms that they make."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jgg.core.arguments import as_finite, as_int, check, check_instance
from jgg.low_rank import LowRank

TARGETS = "w_gate_up", "w_down"

# that of Flax's nnx.LoRA, for each expert; b starts at zero, so that a new adapter changes nothing
lora_init = jax.nn.initializers.he_uniform(batch_axis=(0,))


@dataclasses.dataclass(frozen=True)
class Lora:
    """The options of a layer's adapters, checked.

    Attributes:
      rank, alpha, targets: `lora_rank`, `lora_alpha` and `lora_targets` of `LayerOptions`, without None for alpha where
        there is a rank.
    """

    rank: int | None
    alpha: float | None
    targets: tuple[str, ...]

    @classmethod
    def checked(cls, rank: object, alpha: object, targets: object, known: tuple[str, ...] = TARGETS) -> Self:
        """The options, of targets among the `known` ones; raises if one of them is wrong."""
        expected = f"a tuple of one or both of {known}" if len(known) == 2 else f"a tuple of some of {known}"
        check_instance("lora_targets", targets, tuple | list | str, expected)
        assert isinstance(targets, tuple | list | str)
        names: tuple[Any, ...] = () if isinstance(targets, str) else tuple(targets)
        is_choice = names and all(name in known and names.count(name) == 1 for name in names)
        check(is_choice, f"lora_targets must be {expected}, got {targets!r}.")
        if rank is None:
            check(alpha is None, f"lora_alpha must be None without a lora_rank, got {alpha!r}.")
            return cls(None, None, names)
        rank = as_int("lora_rank", rank, 1, "None or a positive int")
        return cls(rank, float(rank) if alpha is None else as_finite("lora_alpha", alpha), names)

    def shapes(self, weights: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The shapes of a and b beside weights of these shapes, [E, K, N] or [K, N], by name; of targets among them."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.rank is None:
            return shapes
        for target in self.targets:
            if target in weights:
                (a, b), (*experts, rows, columns) = adapter_names(target), weights[target]
                shapes |= {a: (*experts, rows, self.rank), b: (*experts, self.rank, columns)}
        return shapes

    def terms(self, params: Mapping[str, Any]) -> dict[str, LowRank]:
        """The terms by the names of the weights that they are beside."""
        terms: dict[str, LowRank] = {}
        if self.rank is None or self.alpha is None:
            return terms
        for target in self.targets:
            a, b = adapter_names(target)
            terms[target] = LowRank(params[a], params[b], self.alpha / self.rank)
        return terms

    def merge(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters with each term merged into its weights, and its b zero."""
        merged = dict(params)
        for target, term in self.terms(params).items():
            check_instance(target, params[target], jax.Array | np.ndarray, "a float array, to be merged into")
            merged |= {target: term.merge(params[target], "ekn"), adapter_names(target)[1]: jnp.zeros_like(term.b)}
        return merged


def adapter_names(target: str) -> tuple[str, str]:
    """The names of a and b beside the weights of this name."""
    return f"{target}_lora_a", f"{target}_lora_b"
