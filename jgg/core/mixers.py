"""The mixers of a layer, which combine the tokens of a sequence: sizes and options of each kind, as frozen values."""

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
        """An embedding with the same number of pairs, which rotates nothing."""
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
        """FLOPs of the forward pass for each pair of a query and a key that it sees."""
        return 0

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the forward pass for each token, without those of pairs and of the products with parameters."""
        return 0

    @property
    def cached_per_token(self) -> int:
        """How many numbers the cache keeps of each token."""
        return 0

    def pairs(self, lengths: np.ndarray) -> np.ndarray:
        """The number of pairs of a query and a key that it sees, in sequences of these lengths."""
        near = lengths if self.window is None else np.minimum(lengths, self.window)
        return near * (near + 1) // 2 + (lengths - near) * near

    def shapes(self, features: int) -> dict[str, tuple[int, ...]]:
        """The shape of each of the mixer's parameters, by name; `features` is H of its input x [B, S, H]."""
        raise NotImplementedError

    def without_place(self) -> Self:
        """The config without window and rotary embedding; configs that are equal then share shapes and options."""
        return dataclasses.replace(self, window=None, rotary=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(MixerConfig):
    """Attention with grouped queries.

    Attributes:
      num_heads, num_kv_heads: query heads, and key/value heads. Several query heads share one key/value head.
      head_features: D, features of a head.
      scale: factor of the products of queries and keys.
      qk_norm: "head" if each head of queries and keys is normalized, "unit" for the same without weights, "all" if all
        heads are normalized together, or None.
      clip_qkv: the largest magnitude of queries, keys and values, or None.
      use_qkv_bias, use_out_bias: whether the projections have biases.
      is_interleaved: whether features 2i and 2i + 1 of a head form a pair that is rotated, rather than i and D/2 + i.
        Without partial rotation and norms of each head.
      use_sinks: each head has a logit that takes part in the softmax and adds nothing to its result.
      norm_values: whether each head of values is normalized, without a weight.
      are_keys_values: whether values are the keys before norm and rotary embedding, without a projection of their own.
      use_gate: each head's result is scaled by the sigmoid of D more projections of x. They are columns of w_q, after
        the head's own D of its queries.
      chunk: tokens per chunk. A sequence is divided into chunks from its start, and tokens attend only within their
        own; None for no chunks. Without a window.
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
    norm_values: bool = False
    are_keys_values: bool = False
    use_gate: bool = False
    chunk: int | None = None
    temperature_scale: float = 0.0
    temperature_floor: float = 1.0

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of the forward pass for each pair of a query and a key that it sees."""
        return 4 * self.num_heads * self.head_features

    @property
    def cached_per_token(self) -> int:
        """How many numbers the cache keeps of each token."""
        return 2 * self.num_kv_heads * self.head_features

    def pairs(self, lengths: np.ndarray) -> np.ndarray:
        """The number of pairs of a query and a key that it sees, in sequences of these lengths."""
        if self.chunk is None:
            return super().pairs(lengths)
        chunks, rest = lengths // self.chunk, lengths % self.chunk
        return chunks * (self.chunk * (self.chunk + 1) // 2) + rest * (rest + 1) // 2

    def shapes(self, features: int) -> dict[str, tuple[int, ...]]:
        """The shape of each of the mixer's parameters, by name; `features` is H of its input x [B, S, H]."""
        queries, keys = self.num_heads * self.head_features, self.num_kv_heads * self.head_features
        of_q = 2 * queries if self.use_gate else queries
        shapes: dict[str, tuple[int, ...]] = {
            "w_q": (features, of_q),
            "w_k": (features, keys),
            "w_v": (features, keys),
            "w_o": (queries, features),
        }
        if self.use_qkv_bias:
            shapes |= {"b_q": (of_q,), "b_k": (keys,), "b_v": (keys,)}
        if self.use_out_bias:
            shapes["b_o"] = (features,)
        if self.qk_norm in ("head", "all"):
            is_whole = self.qk_norm == "all"
            shapes["q_norm"] = (queries if is_whole else self.head_features,)
            shapes["k_norm"] = (keys if is_whole else self.head_features,)
        if self.use_sinks:
            shapes["sinks"] = (self.num_heads,)
        return {name: shape for name, shape in shapes.items() if not (self.are_keys_values and name in ("w_v", "b_v"))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig(MixerConfig):
    """Multi-head latent attention: keys and values of all heads are products with one short vector of a token.

    Source: DeepSeek-AI, DeepSeek-V2, 2024, 2.1. https://arxiv.org/abs/2405.04434

    Attributes:
      num_heads: heads of queries, keys and values.
      q_rank: features of the vector that queries are products with; None if they are products with x.
      kv_rank: features of the vector that keys and values are products with, the latent.
      plain_features, rotated_features: features of a query or key head without and with rotary embedding. A key's
        rotated features are projected directly from x, and all heads share them.
      value_features: features of a head of values.
      scale: factor of the products of queries and keys.
      is_interleaved: whether the two features of a rotated pair are neighbours; otherwise the halves have one of each.
      use_bias: whether the products of x for queries and for the latent, and the output, have biases. Queries without
        a q_rank have none.
      norm_epsilon: added to the mean square in the norms of both vectors, which no family takes from "rms_norm_eps".
    """

    kind: ClassVar[str] = "latent"

    num_heads: int
    q_rank: int | None
    kv_rank: int
    plain_features: int
    rotated_features: int
    value_features: int
    scale: float
    is_interleaved: bool = True
    use_bias: bool = False
    norm_epsilon: float = 1e-6

    @property
    def head_features(self) -> int:
        """Features of a head of queries and keys."""
        return self.plain_features + self.rotated_features

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of the forward pass for each pair of a query and a key that it sees."""
        return 2 * self.num_heads * (self.head_features + self.value_features)

    @property
    def cached_per_token(self) -> int:
        """How many numbers the cache keeps of each token."""
        return self.kv_rank + self.rotated_features

    def shapes(self, features: int) -> dict[str, tuple[int, ...]]:
        """The shape of each of the mixer's parameters, by name; `features` is H of its input x [B, S, H]."""
        heads, queries = self.num_heads, self.num_heads * self.head_features
        of_queries: dict[str, tuple[int, ...]] = {"w_q": (features, queries)}
        if self.q_rank is not None:
            rank = self.q_rank
            of_queries = {"w_q_a": (features, rank), "q_norm": (rank,), "w_q_b": (rank, queries)}
        shapes = of_queries | {
            "w_kv_a": (features, self.cached_per_token),
            "kv_norm": (self.kv_rank,),
            "w_kv_b": (self.kv_rank, heads * (self.plain_features + self.value_features)),
            "w_o": (heads * self.value_features, features),
        }
        if self.use_bias:
            shapes |= {} if self.q_rank is None else {"b_q_a": (self.q_rank,)}
            shapes |= {"b_kv_a": (self.cached_per_token,), "b_o": (features,)}
        return shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig(MixerConfig):
    """A recurrent layer: a causal convolution, the gated delta rule, and a gated norm.

    Attributes:
      num_key_heads, num_value_heads: heads of the queries and keys, and of the values. Value heads that follow each
        other share a key head.
      key_features, value_features: K and V, features of a head of the queries and keys, and of the values.
      conv_size: how many of the last tokens the convolution sees, a token itself included.
      is_grouped: whether two matrices give all projections, "w_qkvz" and "w_ba", whose columns are those of the first
        key head and its value heads, then those of the second, and so on; else "w_qkv", "w_z", "w_b" and "w_a" do.
    """

    kind: ClassVar[str] = "delta"

    num_key_heads: int
    num_value_heads: int
    key_features: int
    value_features: int
    conv_size: int
    is_grouped: bool

    @property
    def channels(self) -> int:
        """What the convolution takes: features of all heads of queries, keys and values."""
        return 2 * self.num_key_heads * self.key_features + self.num_value_heads * self.value_features

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the forward pass for each token: three products with the state of each head.

        These are what the recurrence takes. Chunks of tokens multiply more often, by matrices.
        """
        return 6 * self.num_value_heads * self.key_features * self.value_features

    def shapes(self, features: int) -> dict[str, tuple[int, ...]]:
        """The shape of each of the mixer's parameters, by name; `features` is H of its input x [B, S, H]."""
        heads, values = self.num_value_heads, self.num_value_heads * self.value_features
        if self.is_grouped:
            shapes = {"w_qkvz": (features, self.channels + values), "w_ba": (features, 2 * heads)}
        else:
            columns = {"w_qkv": self.channels, "w_z": values, "w_b": heads, "w_a": heads}
            shapes = {name: (features, count) for name, count in columns.items()}
        return shapes | {
            "w_conv": (self.channels, 1, self.conv_size),
            "log_a": (heads,),
            "dt_bias": (heads,),
            "norm": (self.value_features,),
            "w_out": (values, features),
        }
