"""Every argument of every public function given something that it cannot be: the error, and that nothing remembers it.

JAX's caches take 4.0 for 4 and True for 1, so one wrong call can break, or change, all the right ones after it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg
import jgg.linen
import jgg.nnx
from jgg.core.activations import Activation, clamped_swiglu
from jgg.layers import MoELayer
from jgg.sharding import MoESharding, interleave, sharded_moe_mlp

MESH = jax.make_mesh((1, 1), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
SHARDING = MoESharding(MESH, data="a", expert="b")


def indices(*shape):
    return jnp.zeros(shape, jnp.int32)


def rows(name, features):
    return {name: jnp.ones((6, features)), "group_sizes": jnp.array([6, 0]), "gather_indices": indices(6)}


def tune(**arguments):
    """Calls `jgg.tune`; FUNCTIONS gives it no products (ops=()), so that nothing runs where there is a GPU."""
    if jax.default_backend() == "gpu":
        jgg.tune(**arguments)
    else:
        with pytest.raises(RuntimeError, match="needs a CUDA device"):
            jgg.tune(**arguments)


W, OPTIONS = jnp.ones((2, 5, 4)), {"precision": "highest", "implementation": "xla"}
PERMUTED = {"topk": 2, "permute_x": False, "permute_y": False, "topk_weights": jnp.ones(6), "w_layout": "enk"}
MLP = {"x": jnp.ones((3, 4)), "w_gate_up": jnp.ones((2, 10, 4)), "w_down": jnp.ones((2, 4, 5)), "w_layout": "enk"}
MLP |= {"b_gate_up": jnp.ones((2, 10)), "b_down": jnp.ones((2, 4)), "activation": "swiglu", "interleaved": False}
MLP |= {
    "low_rank_gate_up": jgg.LowRank(jnp.ones((2, 3, 4)), jnp.ones((2, 10, 3))),
    "low_rank_down": jgg.LowRank(jnp.ones((2, 3, 5)), jnp.ones((2, 4, 3))),
}
CHOICES = {"topk_weights": jnp.ones((3, 2)), "topk_indices": indices(3, 2)}
ROUTER = {"topk": 2, "score": "sigmoid", "normalize": True, "scale": 1.0, "num_groups": 2, "topk_groups": 2}
ROUTER |= {"scores_per_group": 2}
LAYER = ROUTER | {"hidden_features": 5, "num_experts": 4, "shared_features": 3, "activation": "swiglu"}
LAYER |= dict.fromkeys(
    (
        "use_selection_bias",
        "scale_input",
        "interleaved",
        "use_bias",
        "use_router_bias",
        "use_router_scale",
        "use_shared_gate",
    ),
    False,
)
LAYER |= {"lora_rank": 2, "lora_alpha": 3.0, "lora_targets": ("w_down",)}
MODULE = LAYER | OPTIONS | {"dtype": "float32", "param_dtype": jnp.float32, "lora_param_dtype": jnp.float32}
MODULE |= {"sharding": SHARDING}
MODULE |= dict.fromkeys(("kernel_init", "router_init", "bias_init"), nnx.initializers.zeros)

# name: (function, arguments that are right)
FUNCTIONS = {
    "grouped_gemm": (
        jgg.grouped_gemm,
        rows("x", 4)
        | PERMUTED
        | OPTIONS
        | {"w": W, "bias": jnp.ones((2, 5)), "preferred_element_type": "float32"}
        | {"low_rank": jgg.LowRank(jnp.ones((2, 3, 4)), jnp.ones((2, 5, 3)))},
    ),
    "grouped_gemm_forward": (jgg.grouped_gemm_forward, rows("x", 4) | PERMUTED | OPTIONS | {"w": W}),
    "grouped_gemm_dx": (jgg.grouped_gemm_dx, rows("dy", 5) | PERMUTED | OPTIONS | {"w": W}),
    "grouped_gemm_dw": (jgg.grouped_gemm_dw, rows("x", 4) | PERMUTED | OPTIONS | {"dy": jnp.ones((6, 5))}),
    "ragged_dot": (
        jgg.ragged_dot,
        OPTIONS | {"lhs": jnp.ones((6, 4)), "rhs": jnp.ones((2, 4, 5)), "group_sizes": indices(2)},
    ),
    "check": (jgg.check, {"group_sizes": indices(2), "num_rows": 4, "gather_indices": jnp.arange(4)}),
    "moe_mlp": (
        jgg.moe_mlp,
        MLP
        | OPTIONS
        | {"routing": jgg.Routing(**CHOICES, group_sizes=indices(2), gather_indices=indices(6))}
        | {"spare_sms": 1, "expected_rows": 1, "residual_names": {"x": "own"}},
    ),
    "sharded_moe_mlp": (sharded_moe_mlp, MLP | CHOICES | OPTIONS | {"sharding": SHARDING, "residual_names": {}}),
    "interleave": (interleave, {"array": jnp.ones((2, 4)), "axis": 1}),
    "MoESharding": (MoESharding, {"mesh": MESH, "data": "a", "exchange": "all_gather", "buffer_factor": 1.0}),
    "route": (
        jgg.route,
        ROUTER
        | {"logits": jnp.ones((3, 4)), "selection_bias": jnp.ones(4), "topk_indices": indices(3, 2)}
        | {"implementation": "xla"},
    ),
    "router_logits": (
        jgg.router_logits,
        OPTIONS | {"x": jnp.ones((3, 4)), "w_router": jnp.ones((4, 2)), "bias": jnp.ones(2)},
    ),
    "sort_by_expert": (jgg.sort_by_expert, {"topk_indices": indices(3, 2), "num_experts": 4, "implementation": "xla"}),
    "load_balancing_loss": (
        jgg.load_balancing_loss,
        {"logits": jnp.ones((3, 4)), "topk_indices": indices(3, 2), "score": "sigmoid", "mask": jnp.ones(3, bool)},
    ),
    "router_z_loss": (jgg.router_z_loss, {"logits": jnp.ones((3, 4)), "mask": jnp.ones(3, bool)}),
    "update_selection_bias": (
        jgg.update_selection_bias,
        {"selection_bias": jnp.ones(4), "group_sizes": indices(4), "rate": jnp.float32(0.5)},
    ),
    "Activation": (Activation, {"name": "own", "function": jnp.sin, "is_gated": True}),
    "clamped_swiglu": (clamped_swiglu, {"limit": 7.0, "alpha": 1.5}),
    "target": (jgg.target, {"compute_capability": 90, "num_sms": 1}),
    "tune": (
        tune,
        {"num_rows": 4, "in_features": 8, "out_features": 8, "num_experts": 2, "topk": 2, "ops": (), "dtype": "float32"}
        | {"w_layout": "enk", **dict.fromkeys(("permute_x", "permute_y", "weighted", "biased"), False)},
    ),
    "MoELayer": (MoELayer, LAYER | {"in_features": 6}),
    "nnx.MoE": (lambda **options: jgg.nnx.MoE(**options, rngs=nnx.Rngs(0)), MODULE | {"in_features": 6}),
    "linen.MoE": (jgg.linen.MoE, MODULE),
    **{
        config.__name__: (config, dataclasses.asdict(config()))
        for config in (jgg.KernelConfigForward, jgg.KernelConfigDX, jgg.KernelConfigDW)
    },
}
MAY_BE_NONE = {
    "gather_indices",
    "topk_weights",
    "bias",
    "b_gate_up",
    "b_down",
    "scores_per_group",
    "selection_bias",
    "mask",
    "precision",
    "num_sms",
    "implementation",
    "preferred_element_type",
    "dtype",
    "sharding",
    "buffer_factor",
    "expected_rows",
    "residual_names",
    "ops",
    "topk_indices",
    "low_rank",
    "low_rank_gate_up",
    "low_rank_down",
    "lora_rank",
    "lora_alpha",
    "normalize",
}
MUST_BE_GIVEN = {
    ("sharded_moe_mlp", "topk_weights"),
    ("sharded_moe_mlp", "topk_indices"),
    ("sharded_moe_mlp", "sharding"),
    ("sort_by_expert", "topk_indices"),
    ("load_balancing_loss", "topk_indices"),
    ("tune", "dtype"),
}
ANY_SHAPE = {("interleave", "array"), ("sort_by_expert", "topk_indices")}


def wrong(function, name, right):
    """What an argument cannot be, by what it is."""
    yield from ([["nothing"]], object(), jax.random.key(0))
    if name not in MAY_BE_NONE or (function, name) in MUST_BE_GIVEN:
        yield None
    if isinstance(right, bool):
        yield from (int(right), float(right), "yes")
    elif isinstance(right, int):
        yield from (float(right), str(right), right + 0.5, np.float32(right), jnp.ones(2), -9)
        if right == 1:
            yield True
    elif isinstance(right, float):
        yield from ("1", float("nan"), 1j)
    elif name == "name":
        yield 7
    elif isinstance(right, jax.Array):
        yield from ("text", [right.tolist(), "text"])
        if name != "array":
            yield right.astype("complex64")
        if (function, name) not in ANY_SHAPE:
            yield right[None]
    else:
        yield from ("nothing", 7, jnp.ones(3))
        if isinstance(right, jgg.Routing):
            yield from (tuple(right), list(right), right._asdict(), right.topk_weights)


def error_of(call, arguments):
    try:
        call(**arguments)
    except (TypeError, ValueError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_arguments(function):
    call, right = FUNCTIONS[function]
    errors = [
        (name, error_of(call, right | {name: value})) for name in right for value in wrong(function, name, right[name])
    ]
    assert [error for name, error in errors if not (error.startswith(f"{name} must ") and "got " in error)] == []
    kinds = {bool: np.bool_, int: np.int64, float: np.float32}
    call(**{name: kinds.get(type(value), lambda same: same)(value) for name, value in right.items()})
    call(**right)
