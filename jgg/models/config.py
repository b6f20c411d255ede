"""`ModelConfig`, all that a decoder is built from; jgg/models/families.py reads one from each family's config.json."""

import dataclasses
import json
from typing import Any

from jgg.hf.checkpoints import moe_layer
from jgg.layers import MoELayer


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes and options of a decoder, the same for every family; `jgg.models.model_config` makes one.

    Attributes:
      model_type: the family, as config.json names it.
      source: the text of config.json, which `jgg.models.save` writes; the experts' options are read from it.
      vocabulary: V, number of tokens.
      features: H, features between layers.
      num_layers: number of layers, the dense ones included.
      num_further_layers: how many layers a folder may have after these. They predict further tokens, and are not read.
      num_dense_layers: how many of the first layers have an MLP in the place of experts.
      dense_features: hidden features of these MLPs.
      dense_activation: their activation, a name in `jgg.moe_mlp`.
      num_heads, num_kv_heads: heads of the queries, and of the keys and values, each of which several queries share.
      head_features: D, features of a head.
      attention_scale: factor of the products of queries and keys.
      windows: for each layer, how many of the last tokens a token attends to, itself included; None for all.
        All windows have the same size.
      rotary_frequencies: radians per position, of each pair of rotated features; a head's other features stay.
      rotary_scale: factor of the rotated features (YaRN's).
      norm_epsilon: what RMS norms add to the mean square.
      qk_norm: "head" if each head of queries and keys is normalized, "all" if all heads together, or None.
      clip_qkv: the largest magnitude of queries, keys and values, or None.
      use_qkv_bias, use_out_bias: whether the attention's projections have biases.
      use_sinks: each head has a logit that takes part in the softmax and adds nothing to its result.
      is_tied: the matrix of the logits is the embedding.
      embedding_scale, residual_scale, logits_scale: factors of the embedding, of what a layer adds, and of the logits.
      init_scale: standard deviation of new matrices.
      name: what transformers finds the model by, a folder or a name of the Hugging Face Hub; None if it is not known.
    """

    model_type: str
    source: str = dataclasses.field(repr=False)
    vocabulary: int
    features: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_features: int
    attention_scale: float
    windows: tuple[int | None, ...]
    rotary_frequencies: tuple[float, ...] = dataclasses.field(repr=False)
    norm_epsilon: float
    rotary_scale: float = 1.0
    num_further_layers: int = 0
    num_dense_layers: int = 0
    dense_features: int = 0
    dense_activation: str = "swiglu"
    qk_norm: str | None = None
    clip_qkv: float | None = None
    use_qkv_bias: bool = False
    use_out_bias: bool = False
    use_sinks: bool = False
    is_tied: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    init_scale: float = 0.02
    name: str | None = dataclasses.field(default=None, compare=False)

    @property
    def hf(self) -> dict[str, Any]:
        """The content of config.json."""
        return json.loads(self.source)

    @property
    def moe(self) -> MoELayer:
        """The sizes and options of the layers' experts."""
        return moe_layer(self.hf)

    @property
    def attention_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's attention parameters by name."""
        queries, keys = self.num_heads * self.head_features, self.num_kv_heads * self.head_features
        shapes: dict[str, tuple[int, ...]] = {
            "w_q": (self.features, queries),
            "w_k": (self.features, keys),
            "w_v": (self.features, keys),
            "w_o": (queries, self.features),
        }
        if self.use_qkv_bias:
            shapes |= {"b_q": (queries,), "b_k": (keys,), "b_v": (keys,)}
        if self.use_out_bias:
            shapes["b_o"] = (self.features,)
        if self.qk_norm is not None:
            is_whole = self.qk_norm == "all"
            shapes["q_norm"] = (queries if is_whole else self.head_features,)
            shapes["k_norm"] = (keys if is_whole else self.head_features,)
        if self.use_sinks:
            shapes["sinks"] = (self.num_heads,)
        return shapes
