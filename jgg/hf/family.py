"""`Family`: what the models of one architecture of Hugging Face have in common; jgg/hf/families has them all."""

import dataclasses
from collections.abc import Callable, Container, Mapping

from jgg.hf.files import shape_of
from jgg.hf.settings import Arguments, Settings
from jgg.hf.tensors import ENDS, LAYER, Tensor

# the names of rotary embeddings' frequencies, which old folders have and which follow from config.json
FREQUENCIES = r"rotary_emb\.inv_freq"


@dataclasses.dataclass(frozen=True)
class Family:
    """What the models of one architecture have in common: how config.json is read, and what tensors are called.

    Attributes:
      block: name of the MoE block in a decoder layer; "" if its parts are modules of the layer itself.
      options: function from a config's settings to the arguments of `MoELayer`.
      tensors: the tensors of each parameter of the MoE block, with names relative to the block.
      defaults: all keys of config.json that change the logits, with transformers' default for each.
      model: function from a config's settings to the arguments of `jgg.models.ModelConfig`.
      aliases: other names that transformers has for some of these keys.
      only: keys of published configs that have the same value in all models of the family, each with this value. Any
        other value is refused.
      without_effect: keys of published configs that change neither the logits nor what is stored.
      fused: the tensors that transformers 5 writes for these parameters instead when asked for its own format, with
        names relative to the block `fused_block`. jgg reads them, but writes `tensors`.
      layer: the tensors of a layer's other parameters, with names relative to the layer; a model has some of them.
      ends: the tensors of the parameters outside the layers.
      prefix: the beginning of tensor names, before "layers.N.".
      other_prefix: another beginning of tensor names, which `jgg.models` reads instead of `prefix`; or None.
      fused_block: name of the MoE block in transformers 5, if it differs from the checkpoints' name.
      ignored: patterns of the names of tensors that a folder may have though the model does not use them. Saving
        copies them from the folder that the model was loaded from.
      text_type: the model_type in "text_config", for a family whose config.json has its language model there.
      outer: the language model's keys that are read next to "text_config", not in it, with transformers' defaults.
      is_swapped: True if PEFT confuses the in-features of fused experts with their out-features, as it does where they
        are stored [E, in, out] and transformers does not say so.
      has_modules_in_peft: whether PEFT reads adapters of each expert's modules. It does for model types that
        transformers' `_MODEL_TO_CONVERSION_PATTERN` lists as "mixtral" or "qwen2_moe"; otherwise it leaves them out.
    """

    block: str
    options: Callable[[Settings], Arguments]
    tensors: Mapping[str, Tensor]
    defaults: Mapping[str, object]
    model: Callable[[Settings], Arguments]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    only: Mapping[str, object] = dataclasses.field(default_factory=dict)
    without_effect: tuple[str, ...] = ()
    fused: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    layer: Mapping[str, Tensor] = dataclasses.field(default_factory=lambda: LAYER)
    ends: Mapping[str, Tensor] = dataclasses.field(default_factory=lambda: ENDS)
    prefix: str = "model."
    other_prefix: str | None = None
    fused_block: str | None = None
    ignored: tuple[str, ...] = (FREQUENCIES,)
    is_swapped: bool = False
    has_modules_in_peft: bool = True
    text_type: str | None = None
    outer: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def settings(self, config: Mapping[str, object]) -> Settings:
        """Returns the settings of a config of this family."""
        return Settings(config, self.defaults, self.aliases, self.outer)

    def layer_name(self, layer: int) -> str:
        """Returns the beginning of the names of all tensors of a decoder layer."""
        return f"{self.prefix}layers.{layer}."

    def block_name(self, layer: int) -> str:
        """Returns the beginning of the names of all tensors in the MoE block of a decoder layer."""
        return self._in_layer(layer, self.block)

    def fused_block_name(self, layer: int) -> str:
        """Returns the beginning of the names of all tensors in the MoE block in transformers 5."""
        return self._in_layer(layer, self.fused_block or self.block)

    def _in_layer(self, layer: int, block: str) -> str:
        return self.layer_name(layer) + (f"{block}." if block else "")

    def is_in_block(self, name: str, layer: int) -> bool:
        """Whether a tensor of this name is in the MoE block of a decoder layer, as published or in transformers 5."""
        blocks = self.block_name(layer), self.fused_block_name(layer)
        if self.block:
            return name.startswith(blocks)
        others = {blocks[0] + part for tensor in self.layer.values() for part in tensor.names}
        modules = tuple({blocks[0] + tensor.names[0].partition(".")[0] + "." for tensor in self.tensors.values()})
        return name.startswith(modules) and name not in others

    def fused_name(self, layer: int) -> str:
        """Returns the name of the module of all experts in transformers 5."""
        before, *_ = self.fused.get("w_gate_up", self.tensors["w_gate_up"]).names[0].partition("experts")
        return f"{self.fused_block_name(layer)}{before}experts"

    def stored(
        self, name: str, layer: int, names: Container[str], shape: tuple[int, ...] | None = None
    ) -> tuple[str, Tensor]:
        """Returns the block and the tensors, among these names, that hold a parameter of a layer.

        Args:
          name: the parameter.
          layer: the layer's number.
          names: the tensors' names; if `tensors` and `fused` have the same names, a mapping to values with a shape.
          shape: the parameter's shape, which then tells the two apart.
        """
        own = self.tensors[name], self.fused.get(name, self.tensors[name])
        for block in (self.block_name(layer), self.fused_block_name(layer)):
            for tensor in own:
                first = block + tensor.names[0].replace("{e}", "0")
                if first in names:
                    return block, self._by_shape(own, first, names, shape) if own[0].names == own[1].names else tensor
        return self.block_name(layer), own[0]

    def _by_shape(
        self, own: tuple[Tensor, Tensor], name: str, tensors: Container[str], shape: tuple[int, ...] | None
    ) -> Tensor:
        """Of two tensors with one name, the second if the stored shape fits it, as transformers chooses too."""
        if own[0] == own[1] or shape is None:
            return own[0]
        (_, of_second), *_ = own[1].shapes("", shape)
        return own[shape_of(tensors, name) == of_second]
