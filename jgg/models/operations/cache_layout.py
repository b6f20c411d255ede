"""Where the layers of a stack keep keys and values in a cache, if those with a window keep little more than that."""

import itertools
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from jgg.models.operations.cached_heads import Heads

_STEP = 64  # keys: a multiple of those of each step of the kernels


class CacheLayout(NamedTuple):
    """How the layers of a stack share a sequence's part of a cache.

    The key of position p is at slot p of its layer's slots, or at slot p % ring if the layer has the window, where it
    replaces a key that no later token sees. A step of keys is contiguous in both.

    Attributes:
      positions: the most positions of a sequence, and the slots of a layer without the window.
      ring: the slots of a layer with the window, fewer than positions.
      has_window: whether each layer has the window; the cache is [1, B, slots of all layers, ...]. None if all have it;
        the cache is [layers, B, ring, ...].
    """

    positions: int
    ring: int
    has_window: tuple[bool, ...] | None

    @classmethod
    def of(cls, window: int | None, has_window: tuple[bool, ...] | None, positions: int, piece: int) -> Self | None:
        """The layout for at most `piece` tokens at a time after the first; None if no layer needs fewer slots.

        Args:
          window: how many of the last tokens one attends to; None for all, in all layers.
        """
        if window is None:
            return None
        ring = -(-(window + piece - 1) // _STEP) * _STEP
        return cls(positions, ring, has_window) if ring < positions else None

    def cache_shape(self, layers: int) -> tuple[int, int]:
        """The layers and slots of the cache of this many layers."""
        return (layers, self.ring) if self.has_window is None else (1, sum(self._sizes(self.has_window)))

    def size(self, window: int | None, is_local: jax.Array | None) -> jax.Array | int:
        """The slots of a layer with this window, which it has if is_local."""
        if window is None:
            return self.positions
        return self.ring if is_local is None else jnp.where(is_local, jnp.int32(self.ring), jnp.int32(self.positions))

    @property
    def firsts(self) -> jax.Array | None:
        """The first slot of each layer, int32 [layers]; None if it is 0 in all layers."""
        if self.has_window is None:
            return None
        sizes = self._sizes(self.has_window)
        return jnp.asarray(list(itertools.accumulate(sizes[:-1], initial=0)), jnp.int32)

    def _sizes(self, has_window: tuple[bool, ...]) -> list[int]:
        return [self.ring if own else self.positions for own in has_window]


def place_of(
    layout: CacheLayout | None,
    layer: jax.Array | int,
    positions: jax.Array,
    window: int | None,
    is_local: jax.Array | None,
) -> tuple[jax.Array | int, jax.Array]:
    """The index of a layer along the first axis of a cache, and the slots of positions along the third."""
    if layout is None:
        return layer, positions
    slots, firsts = positions % layout.size(window, is_local), layout.firsts
    return (layer, slots) if firsts is None else (0, slots + firsts[layer])


def keys_of(
    layout: CacheLayout | None, cache: Heads, layer: jax.Array | int, window: int | None, is_local: jax.Array | None
) -> Heads:
    """A layer's keys or values [B, positions, ...] in the order of positions; those with no slot are others'."""

    def of_layer(cache: jax.Array) -> jax.Array:
        if layout is None:
            return cache[layer]
        index, slots = place_of(layout, layer, jnp.arange(layout.positions, dtype=jnp.int32), window, is_local)
        return cache[index].at[:, slots].get(mode="promise_in_bounds")

    own: Heads = jax.tree.map(of_layer, cache)
    return own
