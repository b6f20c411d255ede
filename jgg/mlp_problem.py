"""What an expert MLP is to compute: its two grouped GEMMs, and that tokens, parameters and routing fit each other."""

import jax

from jgg.activations import Activation
from jgg.arguments import check_integers, check_one_of, check_rank
from jgg.problem import W_LAYOUTS, GroupedGemmProblem, check_dtype, check_problem, check_same_dtype
from jgg.routing import Routing


def mlp_problems(
    arrays, routing: Routing, activation: Activation, w_layout: str, precision
) -> tuple[GroupedGemmProblem, GroupedGemmProblem]:
    """The problems of the two products of `moe_mlp`; raises where its arguments disagree, as `check_problem` does."""
    hidden = check_mlp(arrays, activation, w_layout)
    x, w_gate_up, w_down = (arrays[name] for name in ("x", "w_gate_up", "w_down"))
    check_choices(x, routing.topk_weights, routing.topk_indices, "routing.")
    num_rows, num_choices = _check_rows(routing, w_gate_up.shape[0])
    shared = {
        "group_sizes": routing.group_sizes, "topk": routing.topk_weights.shape[1], "permute_y": False,
        "topk_weights": None, "w_layout": w_layout, "precision": precision,
    }  # fmt: skip
    up = check_problem(
        x=x, w=w_gate_up, bias=arrays["b_gate_up"], gather_indices=routing.gather_indices, permute_x=True,
        some_choices=num_rows < num_choices, **shared,
    )  # fmt: skip
    rows = jax.ShapeDtypeStruct((num_rows, hidden), up.dtype)
    down = check_problem(x=rows, w=w_down, bias=arrays["b_down"], gather_indices=None, permute_x=False, **shared)
    return up, down


def check_mlp(arrays, activation: Activation, w_layout: str) -> int:
    """I, the hidden features of an expert; raises where the tokens and the parameters disagree.

    Args:
      arrays: by the names of `moe_mlp`'s arguments; biases may be None or missing.
    """
    check_one_of("w_layout", w_layout, W_LAYOUTS)
    axes = {"x": "[T, H]", "w_gate_up": "[E, 2 * I, H] or [E, H, 2 * I]", "w_down": "[E, H, I] or [E, I, H]"}
    for name in axes:
        check_dtype(name, arrays[name])
        check_rank(name, arrays[name], axes[name])
    check_same_dtype({name: arrays[name] for name in axes})
    x, w_gate_up, w_down = (arrays[name] for name in axes)
    in_by_out = [w.shape[1:] if w_layout == "ekn" else w.shape[:0:-1] for w in (w_gate_up, w_down)]
    (got_features, wide), down_features = in_by_out
    num_experts, features = w_gate_up.shape[0], x.shape[1]
    if got_features != features:
        raise ValueError(f"w_gate_up must have H in-features equal to x's {features}, got {list(w_gate_up.shape)}.")
    hidden, rest = divmod(wide, 2 if activation.is_gated else 1)
    if rest:
        raise ValueError(f"w_gate_up must have 2 * I out-features for activation {activation.name!r}, got {wide}.")
    expected, got = [num_experts, hidden, features], [w_down.shape[0], *down_features]
    if got != expected:
        raise ValueError(
            f"w_down must have E, I, H = {expected} by x, w_gate_up and the activation {activation.name!r}, got {got}."
        )
    for name, out_features in (("b_gate_up", wide), ("b_down", features)):
        bias, shape = arrays.get(name), (num_experts, out_features)
        if bias is not None:
            check_dtype(name, bias)
            if bias.shape != shape:
                raise ValueError(f"{name} must be [E, N] = {list(shape)}, got {list(bias.shape)}.")
    return hidden


def check_choices(x, topk_weights, topk_indices, prefix: str = ""):
    """Raises unless both are [T, k] with T of x, floats and integers; `prefix` goes before their names."""
    check_dtype(f"{prefix}topk_weights", topk_weights)
    check_rank(f"{prefix}topk_weights", topk_weights, "[T, k]")
    check_integers(f"{prefix}topk_indices", topk_indices)
    num_tokens, topk = topk_weights.shape
    if num_tokens != x.shape[0] or topk == 0:
        raise ValueError(
            f"{prefix}topk_weights must be [T, k] with T equal to x's {x.shape[0]} and k at least 1, "
            f"got {[num_tokens, topk]}."
        )
    if topk_indices.shape != topk_weights.shape:
        raise ValueError(
            f"{prefix}topk_indices must be [T, k] = {[num_tokens, topk]} as {prefix}topk_weights, "
            f"got {list(topk_indices.shape)}."
        )


def _check_rows(routing, num_experts):
    """Rows, and choices of all tokens; raises where the two do not fit each other or the experts."""
    sizes, indices = routing.group_sizes, routing.gather_indices
    if sizes.shape != (num_experts,):
        raise ValueError(f"routing.group_sizes must be [E] = [{num_experts}], got {list(sizes.shape)}.")
    num_choices = routing.topk_weights.size
    if len(indices.shape) != 1 or indices.shape[0] > num_choices:
        raise ValueError(
            f"routing.gather_indices must be [M] with M at most T * k = {num_choices}, got {list(indices.shape)}."
        )
    return indices.shape[0], num_choices
