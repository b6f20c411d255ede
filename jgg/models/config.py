"""`ModelConfig`, everything a decoder is built from, and how to read one from config.json."""

import dataclasses
import functools
import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer

from jgg.core.arguments import check_instance
from jgg.core.mixers import MixerConfig
from jgg.experts.layer import MoELayer
from jgg.hf.checkpoints import moe_layer
from jgg.hf.families import FAMILIES
from jgg.hf.family import Family
from jgg.hf.model_settings import check_keys, read_model
from jgg.models.left_out import LeftOut
from jgg.models.stack_plan import Period, StackPlan, plan_of, schedule_of


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes and options of a decoder, the same for every family; `jgg.models.model_config` makes one.

    Attributes:
      model_type: the family, as config.json names it.
      source: the text of config.json, which `jgg.models.save` writes; the experts' options are read from it.
      vocabulary: V, number of tokens.
      features: H, features between layers.
      num_layers: number of layers, the dense ones included.
      num_further_layers: how many more layers a folder may have; these predict further tokens and are not read.
      mixers: for each layer, the options of its mixer, attention or another kind, which mixes a sequence's tokens.
      is_dense: for each layer, whether it has an MLP instead of experts.
      dense_features: hidden features of these MLPs, and of MLPs alongside experts.
      dense_activation: their activation, a name in `jgg.moe_mlp`.
      layout: how the parts of a layer are put together, a name in `jgg.models.stacks.LAYOUTS`.
      norm_epsilon: what RMS norms add to the mean square.
      norm_offset: what is added to the scales of RMS norms. It is 1 where scales are stored around zero; new scales are
        then zero.
      is_tied: whether the embedding is also the matrix of the logits.
      embedding_scale, residual_scale, logits_scale: factors of the embedding, of each layer's additions to the residual
        stream, and of the logits.
      logits_softcap: bound on the magnitude of the logits, applied with tanh; None for no bound.
      init_scale: standard deviation of new matrices.
      left_out: the tensors and files in the loaded folder that the model does not have and `jgg.models.save` copies;
        None if there are none. Configs with different `left_out` are not equal, so that a compiled function does not
        return a model with another folder's.
      name: what transformers finds the model by, the absolute path of a folder or a name of the Hugging Face Hub; None
        if unknown.
    """

    model_type: str
    source: str = dataclasses.field(repr=False)
    vocabulary: int
    features: int
    num_layers: int
    mixers: tuple[MixerConfig, ...]
    is_dense: tuple[bool, ...]
    norm_epsilon: float
    norm_offset: float = 0.0
    num_further_layers: int = 0
    dense_features: int = 0
    dense_activation: str = "swiglu"
    layout: str = "plain"
    is_tied: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    init_scale: float = 0.02
    left_out: LeftOut | None = dataclasses.field(default=None, repr=False)
    name: str | None = dataclasses.field(default=None, compare=False)

    @functools.cached_property
    def plan(self) -> tuple[StackPlan, ...]:
        """The stacks of layers that are alike, in the order of their first layers."""
        return plan_of(self.mixers, self.is_dense)

    @functools.cached_property
    def schedule(self) -> tuple[Period, ...]:
        """The order in which layers run, as periods of stacks that repeat."""
        names = {number: plan.name for plan in self.plan for number in plan.numbers}
        return schedule_of([names[number] for number in range(self.num_layers)])

    @property
    def num_moe_layers(self) -> int:
        """L, the number of layers that have experts."""
        return self.num_layers - sum(self.is_dense)

    @property
    def norm_init(self) -> Initializer:
        """Makes the stored scales of new RMS norms, which multiply by one."""
        return jax.nn.initializers.constant(1 - self.norm_offset)

    def norm_scale(self, stored: jax.Array) -> jax.Array:
        """The factor that an RMS norm multiplies each feature by, from its stored scale."""
        return stored.astype(jnp.float32) + self.norm_offset if self.norm_offset else stored

    @property
    def family(self) -> Family:
        """What the models of the family have in common."""
        return FAMILIES[self.model_type]

    @property
    def hf(self) -> dict[str, object]:
        """The content of config.json."""
        return json.loads(self.source)

    @property
    def moe(self) -> MoELayer:
        """The sizes and options of the layers' experts."""
        return moe_layer(self.hf)


def model_config(config: Mapping[str, object]) -> ModelConfig:
    """Reads a decoder's sizes and options from the content of config.json.

    Missing keys get the defaults of transformers' configuration class.

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
      ValueError: `jgg.models` does not have the family; or the config has a key that `jgg.models` does not know, or a
        value that none of its models can have. The message names the key.
      TypeError: config is not a mapping, or a value has the wrong type.
    """
    check_instance("config", config, Mapping, "a mapping, as jgg.hf.read_config returns it")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type must be one of {sorted(FAMILIES)}, got {model_type!r}.")
    own = FAMILIES[model_type]
    settings = own.settings(config)
    check_keys(config, own)
    moe_layer(config)  # raises where the experts' options are wrong
    source = json.dumps(dict(config), indent=2) + "\n"
    return ModelConfig(model_type=model_type, source=source, **read_model(settings) | own.model(settings))
