"""Functions from the settings of each family's config.json to the arguments of `MoELayer`."""

from typing import Any

from jgg.activations import clamped_swiglu
from jgg.core.arguments import check, check_one_of
from jgg.hf.settings import Settings

_MOST_EXPERTS = 65_536  # each may have tensors of its own
ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu"}


def _options(settings: Settings, experts: str, hidden_features: str, **others: Any) -> dict[str, Any]:
    """Returns the arguments of `MoELayer`; `experts` and `hidden_features` are the keys that a family has for them."""
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


def mixtral(settings: Settings) -> dict[str, Any]:
    """Options of Mixtral and GraniteMoE."""
    return _options(settings, "num_local_experts", "intermediate_size", score="topk_softmax")


def qwen3_moe(settings: Settings, **others: Any) -> dict[str, Any]:
    """Options of Qwen3-MoE."""
    normalize = settings.flag("norm_topk_prob")
    return _options(settings, "num_experts", "moe_intermediate_size", normalize=normalize, **others)


def qwen3_next(settings: Settings) -> dict[str, Any]:
    """Options of Qwen3-Next, whose shared expert has a gate."""
    return qwen3_moe(settings, shared_features=settings.int("shared_expert_intermediate_size"), use_shared_gate=True)


def olmoe(settings: Settings) -> dict[str, Any]:
    """Options of OLMoE."""
    return _options(settings, "num_experts", "intermediate_size", normalize=settings.flag("norm_topk_prob"))


def deepseek(settings: Settings) -> dict[str, Any]:
    """Options of DeepSeek-V3, Kimi-K2 and GLM-4.5, which choose among groups of experts."""
    num_groups, topk_groups = settings.int("n_group"), settings.int("topk_group")
    shared = settings.int("n_shared_experts", 0) * settings.int("moe_intermediate_size")
    options = _options(
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


def llama4(settings: Settings) -> dict[str, Any]:
    """Options of Llama 4."""
    return _options(
        settings,
        "num_local_experts",
        "intermediate_size",
        score="sigmoid",
        normalize=False,
        scale_input=True,
        shared_features=settings.int("intermediate_size"),
    )


def gpt_oss(settings: Settings) -> dict[str, Any]:
    """Options of gpt-oss."""
    limit = settings.number("swiglu_limit")
    check(limit > 0, f"swiglu_limit must be more than 0, got {limit}.")
    activation = clamped_swiglu(limit, settings.number("swiglu_alpha"))
    return _options(
        settings,
        "num_local_experts",
        "intermediate_size",
        score="topk_softmax",
        interleaved=True,
        use_bias=True,
        activation=activation,
        use_router_bias=True,
    )
