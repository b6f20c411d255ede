"""Families of folders with a language model and towers, which process images or sound."""

import dataclasses
import re
from collections.abc import Mapping

from jgg.hf.family import Family
from jgg.hf.tensors import Tensor

# keys next to "text_config" that say nothing about the language model
_NAMES = """
    audio_config audio_token_id boa_token_id boi_token_id boi_token_index eoa_token_id eoa_token_index eoi_token_id
    eoi_token_index image_token_id image_token_index video_token_id vision_config vision_end_token_id
    vision_soft_tokens_per_image vision_start_token_id
"""
OF_TOWERS = set(_NAMES.split())


def in_multimodal(
    text: Family,
    text_type: str,
    *,
    prefix: str = "model.language_model.",
    root: str = "",
    towers: tuple[str, ...],
    outer: Mapping[str, object],
) -> Family:
    """The family of folders that have towers and a language model of another family.

    The towers' tensors are not part of the model.

    Args:
      text: the family of the language model alone; its config.json is the "text_config" here.
      text_type: the language model's model_type.
      prefix: how the language model's tensor names begin here; in its own folders they begin differently.
      root: how names begin here that have no such prefix in its own folders, such as the head's.
      towers: how the names of other tensors begin.
      outer: as in `Family`.
    """

    def moved(tensor: Tensor) -> Tensor:
        names = (
            prefix + name.removeprefix(text.prefix) if name.startswith(text.prefix) else root + name
            for name in tensor.names
        )
        return dataclasses.replace(tensor, names=tuple(names))

    return dataclasses.replace(
        text,
        prefix=prefix,
        ends={name: moved(tensor) for name, tensor in text.ends.items()},
        ignored=(*text.ignored, *(f"^{re.escape(tower)}" for tower in towers)),
        text_type=text_type,
        outer=outer,
    )
