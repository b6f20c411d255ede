"""What mixes the tokens of a sequence in a layer: the sizes and options of each kind, as frozen values."""

import dataclasses
from typing import ClassVar, Self

import numpy as np


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
    """A rotary position embedding.

    Attributes:
      frequencies: radians per position, of each pair of rotated features; a head's other features stay. Where all are
        0, nothing is rotated (NoPE).
      scale: factor of the rotated features (YaRN's).
    """

    frequencies: tuple[float, ...] = dataclasses.field(repr=False)
    scale: float = 1.0

    @property
    def unrotated(self) -> Self:
        """The embedding of as many pairs that rotates nothing."""
        return dataclasses.replace(self, frequencies=(0.0,) * len(self.frequencies), scale=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerConfig:
    """What the configs of all kinds of mixers have.

    Attributes:
      kind: the name of the kind in `jgg.models.layer.MIXERS`, and of the layer's attribute that is the mixer.
      window: how many of the last tokens a token attends to, itself included; None for all.
      rotary: the rotary embedding; None without one.
    """

    kind: ClassVar[str]

    window: int | None = None
    rotary: RotaryConfig | None = None

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of the forward pass for each pair of a token and one that it attends to."""
        return 0

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the forward pass for each token beside those of pairs and of the products with matrices."""
        return 0

    @property
    def cached_per_token(self) -> int:
        """How many numbers the cache keeps of each token."""
        return 0

    def pairs(self, lengths: np.ndarray) -> np.ndarray:
        """How many pairs of a token and one that it attends to there are in sequences of these lengths."""
        near = lengths if self.window is None else np.minimum(lengths, self.window)
        return near * (near + 1) // 2 + (lengths - near) * near

    def shapes(self, features: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's parameters by name, in a model of so many features between layers."""
        raise NotImplementedError

    def without_place(self) -> Self:
        """The config without window and rotary embedding: where these are equal, so are shapes and options."""
        return dataclasses.replace(self, window=None, rotary=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(MixerConfig):
    """Attention with grouped queries.

    Attributes:
      num_heads, num_kv_heads: heads of the queries, and of the keys and values, each of which several queries share.
      head_features: D, features of a head.
      scale: factor of the products of queries and keys.
      qk_norm: "head" if each head of queries and keys is normalized, "unit" if so without weights, "all" if all heads
        are together, or None.
      clip_qkv: the largest magnitude of queries, keys and values, or None.
      use_qkv_bias, use_out_bias: whether the projections have biases.
      is_interleaved: whether features 2i and 2i + 1 of a head form a pair that is rotated, rather than i and D/2 + i.
        Without partial rotation and norms of each head.
      use_sinks: each head has a logit that takes part in the softmax and adds nothing to its result.
      chunk: a sequence's first tokens, so many, attend to each other alone, and so do the next; None for all. Without
        a window.
      temperature_scale, temperature_floor: a query at position p is multiplied by 1 + temperature_scale * log(1 +
        floor((p + 1) / temperature_floor)).
    """

    kind: ClassVar[str] = "attention"

    num_heads: int
    num_kv_heads: int
    head_features: int
    scale: float
    qk_norm: str | None = None
    clip_qkv: float | None = None
    use_qkv_bias: bool = False
    use_out_bias: bool = False
    is_interleaved: bool = False
    use_sinks: bool = False
    chunk: int | None = None
    temperature_scale: float = 0.0
    temperature_floor: float = 1.0

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of the forward pass for each pair of a token and one that it attends to."""
        return 4 * self.num_heads * self.head_features

    @property
    def cached_per_token(self) -> int:
        """How many numbers the cache keeps of each token."""
        return 2 * self.num_kv_heads * self.head_features

    def pairs(self, lengths: np.ndarray) -> np.ndarray:
        """How many pairs of a token and one that it attends to there are in sequences of these lengths."""
        if self.chunk is None:
            return super().pairs(lengths)
        chunks, rest = lengths // self.chunk, lengths % self.chunk
        return chunks * (self.chunk * (self.chunk + 1) // 2) + rest * (rest + 1) // 2

    def shapes(self, features: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's parameters by name, in a model of so many features between layers."""
        queries, keys = self.num_heads * self.head_features, self.num_kv_heads * self.head_features
        shapes: dict[str, tuple[int, ...]] = {
            "w_q": (features, queries),
            "w_k": (features, keys),
            "w_v": (features, keys),
            "w_o": (queries, features),
        }
        if self.use_qkv_bias:
            shapes |= {"b_q": (queries,), "b_k": (keys,), "b_v": (keys,)}
        if self.use_out_bias:
            shapes["b_o"] = (features,)
        if self.qk_norm in ("head", "all"):
            is_whole = self.qk_norm == "all"
            shapes["q_norm"] = (queries if is_whole else self.head_features,)
            shapes["k_norm"] = (keys if is_whole else self.head_features,)
        if self.use_sinks:
            shapes["sinks"] = (self.num_heads,)
        return shapes
