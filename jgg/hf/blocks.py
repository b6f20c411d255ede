"""The architectures of which jgg reads the MoE blocks alone, and not whole models."""

from typing import Any

from jgg.hf.expert_settings import read_experts, read_groups, read_normalized
from jgg.hf.family import Family
from jgg.hf.settings import Settings
from jgg.hf.tensors import FUSED, IN_OUT, QWEN, SELECTION_BIAS, as_is, matrix, shared


def _qwen3_next(settings: Settings) -> dict[str, Any]:
    shared_features = settings.int("shared_expert_intermediate_size")
    return read_normalized(settings, shared_features=shared_features, use_shared_gate=True)


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


DEEPSEEK = Family(
    "mlp",
    read_groups,
    QWEN | {SELECTION_BIAS: as_is("gate.e_score_correction_bias")} | shared("shared_experts"),
    defaults={
        "hidden_act": "silu",
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
    lacks="has latent attention",
    aliases={"n_routed_experts": "num_local_experts"},
    fused=FUSED,
)
FAMILIES = {
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": DEEPSEEK,
    "qwen3_next": Family(
        "mlp",
        _qwen3_next,
        QWEN | shared("shared_expert") | {"w_shared_gate": matrix("shared_expert_gate.weight")},
        defaults={
            "hidden_act": "silu",
            "hidden_size": 2048,
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "shared_expert_intermediate_size": 512,
        },
        lacks="has layers with a recurrent state",
        aliases={"num_experts": "num_local_experts"},
        fused=FUSED,
    ),
    "llama4": Family(
        "feed_forward",
        _llama4,
        IN_OUT | shared("shared_expert"),
        defaults={
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
        },
        lacks="attends within chunks",
        prefix="language_model.model.",
        is_swapped=True,
    ),
}
