"""Llama 4."""

from typing import Any

from jgg.hf.expert_settings import read_experts
from jgg.hf.family import Family
from jgg.hf.settings import Settings
from jgg.hf.tensors import IN_OUT, shared


def _llama4(settings: Settings) -> dict[str, Any]:
    return read_experts(
        settings,
        "num_local_experts",
        "intermediate_size",
        score="sigmoid",
        normalize=False,
        scale_input=True,
        shared_features=settings.int("intermediate_size"),
    )


LLAMA4 = Family(
    "feed_forward",
    _llama4,
    IN_OUT | shared("shared_expert"),
    defaults={"hidden_size": 5120, "intermediate_size": 8192, "hidden_act": "silu"}
    | {"num_experts_per_tok": 1, "num_local_experts": 16},
    lacks="attends within chunks",
    prefix="language_model.model.",
    is_swapped=True,
)
