"""`ModelConfig`, all that a decoder is built from, with its plan of layers, and how one is read from config.json."""

import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any

from jgg.core.arguments import check_instance
from jgg.hf.checkpoints import moe_layer
from jgg.hf.families import FAMILIES
from jgg.hf.family import Family
from jgg.hf.model_settings import check_keys, read_model
from jgg.layers import MoELayer


@dataclasses.dataclass(frozen=True)
class StackPlan:
    """Layers that are alike and follow each other: a decoder stacks their parameters, and runs them in one scan.

    Attributes:
      name: the attribute of a `Decoder` that has them.
      first, count: the number of the first of them, and how many they are.
      mixer: what mixes the tokens of a sequence, a name in jgg/models/layer.py.
      is_dense: whether they have an MLP in the place of experts.
      windows: for each of them, how many of the last tokens a token attends to; None for all.
    """

    name: str
    first: int
    count: int
    mixer: str
    is_dense: bool
    windows: tuple[int | None, ...]

    @property
    def numbers(self) -> range:
        """The layers' numbers."""
        return range(self.first, self.first + self.count)

    @property
    def window(self) -> int | None:
        """The size of the windows; None if no layer has one."""
        return next(filter(None, self.windows), None)

    @property
    def has_window(self) -> tuple[bool, ...] | None:
        """For each layer, whether it has a window; None if all do or none does."""
        return None if len(set(self.windows)) == 1 else tuple(window is not None for window in self.windows)


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
      mixers: for each layer, what mixes the tokens of a sequence; "attention" in all families.
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
    mixers: tuple[str, ...] = ()
    name: str | None = dataclasses.field(default=None, compare=False)

    @property
    def plan(self) -> tuple[StackPlan, ...]:
        """The layers in the order in which they run, those side by side that are alike as one stack."""
        mixers = self.mixers or ("attention",) * self.num_layers
        kinds = [(mixer, number < self.num_dense_layers) for number, mixer in enumerate(mixers)]
        stacks: dict[str, StackPlan] = {}
        for (mixer, is_dense), own in itertools.groupby(range(self.num_layers), kinds.__getitem__):
            first, *others = own
            count, name = 1 + len(others), "dense_layers" if is_dense else "layers"
            name = f"{name}_{first}" if name in stacks else name
            stacks[name] = StackPlan(name, first, count, mixer, is_dense, self.windows[first : first + count])
        return tuple(stacks.values())

    @property
    def num_moe_layers(self) -> int:
        """L, the number of layers that have experts."""
        return self.num_layers - self.num_dense_layers

    @property
    def family(self) -> Family:
        """What the models of the family have in common."""
        return FAMILIES[self.model_type]

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


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a decoder's sizes and options from the content of config.json.

    A key that config lacks has the default of transformers' configuration class.

    Examples:
      >>> import jgg.models
      >>> config = jgg.models.model_config({
      ...     "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
      ...     "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
      ...     "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
      ...     "rms_norm_eps": 1e-6, "rope_theta": 1e6,
      ... })
      >>> config.features, config.moe.num_experts
      (32, 4)

    Args:
      config: content of config.json, as `jgg.hf.read_config` returns it.

    Raises:
      ValueError: the family is none of those that `jgg.models` has; or the config has a key that `jgg.models` does not
        know, or a value that no model of it can have. The message names the key.
      TypeError: config is no mapping, or a value has the wrong type.
    """
    check_instance("config", config, Mapping, "a mapping, as jgg.hf.read_config returns it")
    model_type, known = config.get("model_type"), sorted(name for name, own in FAMILIES.items() if own.model)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type must be one of {known}, got {model_type!r}.")
    own = FAMILIES[model_type]
    if own.model is None:
        raise ValueError(f"model_type must be one of {known}: {model_type!r} {own.lacks}.")
    settings = own.settings(config)
    check_keys(config, settings)
    moe_layer(config)  # raises where the experts' options are wrong
    source = json.dumps(dict(config), indent=2) + "\n"
    return ModelConfig(model_type=model_type, source=source, **read_model(settings) | own.model(settings))
