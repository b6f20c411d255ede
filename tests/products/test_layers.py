"""Forward and gradients of both GEMMs of well-known MoE layers on a GPU: bfloat16, uneven groups, poisoned memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from tests.support.passes import forward_and_backward

pytestmark = [pytest.mark.gpu, pytest.mark.large(24.0)]

NUM_TOKENS = 1024
# hidden features, hidden features of an expert, experts (of one device), experts per token
LAYERS = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "olmoe-1b-7b": (2048, 1024, 64, 8),
    "deepseek-v3-ep8": (7168, 2048, 32, 8),
    "qwen3-235b-a22b": (4096, 1536, 128, 8),
    "finegrained-7b": (1536, 256, 128, 8),
    "granite-3.1-3b-a800m": (1536, 512, 40, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
}


@pytest.fixture(autouse=True)
def freed_memory_is_nan():
    """Leaves NaN in the memory that the outputs get, so that an element nobody writes shows."""
    jnp.full((2**31,), jnp.nan, jnp.bfloat16).block_until_ready().delete()


def make_data(in_features, out_features, experts, topk, gather):
    rng = np.random.default_rng(0)
    num_rows = NUM_TOKENS * topk
    shares = rng.dirichlet(np.ones(experts) / 0.09)
    group_sizes = rng.multinomial(num_rows - 37, shares)  # 37 rows belong to no expert
    group_sizes[experts // 2] = 0
    keys = jax.random.split(jax.random.key(0), 4)
    x_rows, y_rows = (NUM_TOKENS if gather else num_rows), num_rows
    return {
        "x": jax.random.normal(keys[0], (x_rows, in_features), jnp.bfloat16),
        "w": jax.random.normal(keys[1], (experts, out_features, in_features), jnp.bfloat16) / in_features**0.5,
        "topk_weights": jax.random.uniform(keys[2], (num_rows,)),
        "dy": jax.random.normal(keys[3], (y_rows, out_features), jnp.bfloat16),
        "group_sizes": jnp.asarray(group_sizes, jnp.int32),
        "gather_indices": jnp.asarray(rng.permutation(num_rows), jnp.int32),
    }


def run(implementation, topk, gather, dtype, data):
    """y, dx, dw and d topk_weights; the up GEMM gathers, the down GEMM scatters and scales."""

    @jax.jit
    def both(x, w, topk_weights, dy, group_sizes, gather_indices):
        def forward(x, w, topk_weights):
            return jgg.grouped_gemm(
                x,
                w,
                group_sizes,
                topk,
                gather_indices,
                permute_x=gather,
                permute_y=not gather,
                topk_weights=None if gather else topk_weights,
                precision="highest",
                implementation=implementation,
            )

        return forward_and_backward(forward)(dy, x.astype(dtype), w.astype(dtype), topk_weights)

    return both(**data)


@jax.jit
def error(got, want):
    """The largest error relative to the largest element; NaN where got has NaN."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.max(jnp.abs(got - want)) / jnp.maximum(jnp.max(jnp.abs(want)), 1e-30)


@pytest.mark.parametrize("gather", [True, False], ids=["up", "down"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_layer(layer, gather):
    hidden, expert_hidden, experts, topk = layer
    features = (hidden, 2 * expert_hidden) if gather else (expert_hidden, hidden)
    data = make_data(*features, experts, topk, gather)
    got = run("triton", topk, gather, jnp.bfloat16, data)
    own = run("xla", topk, gather, jnp.bfloat16, data)
    want = run("xla", topk, gather, jnp.float32, data)
    for name, ours, xlas, exact in zip(("y", "dx", "dw", "d_topk_weights"), got, own, want, strict=True):
        bound = 2 * error(xlas, exact) + 1e-5
        assert error(ours, exact) <= bound, f"{name}: {error(ours, exact)} > {bound}"
