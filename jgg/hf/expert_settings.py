"""Reads settings of a layer's experts that several families share into the arguments of `MoELayer`."""

from typing import Any

from jgg.core.arguments import check, check_one_of
from jgg.hf.settings import Arguments, Settings

_MOST_EXPERTS = 65_536  # each may have tensors of its own
ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu"}


def read_experts(settings: Settings, experts: str, hidden_features: str, **others: Any) -> Arguments:
    """Returns the arguments of `MoELayer`, together with a family's other arguments.

    Args:
      settings: the settings.
      experts, hidden_features: the family's keys for the number of experts and for their hidden features.
      others: more arguments.
    """
    num_experts, topk = settings.int(experts, most=_MOST_EXPERTS), settings.int("num_experts_per_tok")
    activation = settings.get("hidden_act")
    check_one_of("hidden_act", activation, sorted(ACTIVATIONS))
    most = f"{settings.name(experts)}, {num_experts}"
    check(topk <= num_experts, f"num_experts_per_tok must be at most {most}, got {topk}.")
    return {
        "in_features": settings.int("hidden_size"),
        "hidden_features": settings.int(hidden_features),
        "num_experts": num_experts,
        "topk": topk,
        "activation": ACTIVATIONS[activation],
    } | others


def read_normalized(settings: Settings, hidden_features: str = "moe_intermediate_size", **others: Any) -> Arguments:
    """Returns the arguments of a layer whose "norm_topk_prob" says whether weights are normalized, as in Qwen3-MoE."""
    normalize = settings.flag("norm_topk_prob")
    return read_experts(settings, "num_experts", hidden_features, normalize=normalize, **others)


def read_groups(settings: Settings) -> Arguments:
    """Returns the arguments of a layer that chooses among groups of experts, as in DeepSeek-V3."""
    num_groups, topk_groups = settings.int("n_group"), settings.int("topk_group")
    shared = settings.int("n_shared_experts", 0) * settings.int("moe_intermediate_size")
    options = read_experts(
        settings,
        "n_routed_experts",
        "moe_intermediate_size",
        score="sigmoid",
        use_selection_bias=True,
        normalize=settings.flag("norm_topk_prob"),
        scale=settings.number("routed_scaling_factor"),
        num_groups=num_groups,
        topk_groups=topk_groups,
        shared_features=shared,
    )
    num_experts = options["num_experts"]
    name = settings.name("n_routed_experts")
    check(num_experts % num_groups == 0, f"n_group must divide {name}, {num_experts}, got {num_groups}.")
    check(topk_groups <= num_groups, f"topk_group must be at most n_group, {num_groups}, got {topk_groups}.")
    eligible = topk_groups * (num_experts // num_groups)
    most = f"the number of experts in topk_group = {topk_groups} groups, {eligible}"
    check(options["topk"] <= eligible, f"num_experts_per_tok must be at most {most}, got {options['topk']}.")
    return options
