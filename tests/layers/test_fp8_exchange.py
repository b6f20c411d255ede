"""Rows that are sent between devices in FP8; tests/programs/run_sharding.py tests them on eight devices too."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval as pe

import jgg
from jgg.sharding import MoESharding, sharded_moe_mlp
from tests.support.sharded_cases import SEVERAL_GPUS, assert_fp8_case_is_right, make_terms, need_gpus

RECIPES = {"e4m3": jgg.Fp8(), "e5m2": jgg.Fp8(jnp.float8_e5m2, power_of_2_scales=True)}
NAMES = "expert by all-gather", "expert by ragged all-to-all", "ragged, room for three in ten"
AUTO = jax.sharding.AxisType.Auto


def rows_sent(devices, exchange, recipe, argnums=(0, 1, 2)):
    """Dtype and shape of all rows of features that the collectives of forward and backward return."""
    mesh = jax.sharding.AbstractMesh((devices,), ("a",), axis_types=(AUTO,))
    sharding = MoESharding(mesh, expert="a", exchange=exchange)

    def loss(x, w_gate_up, w_down, topk_weights, topk_indices):
        arrays = x, w_gate_up, w_down, topk_weights, topk_indices
        y, _ = sharded_moe_mlp(*arrays, sharding=sharding, w_layout="ekn", quantization=recipe)
        return jnp.sum(y.astype(jnp.float32))

    shapes = (32, 256), (8, 256, 512), (8, 256, 256), (32, 3)
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    choices = jax.ShapeDtypeStruct((32, 3), "int32")
    traced = jax.make_jaxpr(jax.value_and_grad(loss, argnums) if argnums else loss)(*arrays, choices)
    program = str(pe.dce_jaxpr(traced.jaxpr, [True] * len(traced.out_avals))[0])  # without what no result needs
    collectives = "all_gather|reduce_scatter|ragged_all_to_all"
    return re.findall(rf":(\w+\[\d+,(?:256|2)\])\S* = (?:{collectives})\[", program)


@pytest.mark.parametrize(("exchange", "there", "back"), [("all_gather", 32, 16), ("ragged_all_to_all", 32, 32)])
def test_values_and_scales_go_there_and_sums_come_back(exchange, there, back):
    """x and dy are a byte for each feature and a scale for 128; y and dx come back in bfloat16."""
    both_ways = [f"u8[{there},256]", f"f32[{there},2]", f"bf16[{back},256]"]
    sent = rows_sent(2, exchange, jgg.Fp8())
    features = [rows for rows in sent if rows.endswith(",256]")]
    assert features == both_ways[::2] * 2
    assert sent.count(both_ways[1]) == 2
    assert [rows for rows in rows_sent(2, exchange, jgg.Fp8(), ()) if rows.endswith(",256]")] == both_ways[::2]


def test_nothing_is_rounded_that_is_not_sent():
    """One device along the axis, or no recipe: rows stay in the dtype of x."""
    assert not any(rows.startswith("u8") for rows in rows_sent(1, "all_gather", jgg.Fp8()))
    assert not any(rows.startswith("u8") for rows in rows_sent(2, "all_gather", None))


@pytest.mark.gpu
@SEVERAL_GPUS
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("has_terms", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_on_gpus(name, has_terms, recipe):
    need_gpus(2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(1, 2, 1), ("a", "b", "c"), axis_types=(AUTO,) * 3)
    assert_fp8_case_is_right(name, mesh, RECIPES[recipe], make_terms(256, 256) if has_terms else None)
