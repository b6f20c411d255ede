"""A mixture of experts in your own model code: functions, `jax.jit` and `jax.grad`, no framework.

    python examples/jit_model.py    # on a GPU, or seconds on a CPU

The model learns to negate one half of each token. Which half, the router can tell by the token's first feature.
"""

import functools

import jax
import jax.numpy as jnp

import jgg

TOKENS, FEATURES, HIDDEN, EXPERTS, TOPK = 256, 16, 32, 4, 2


def init(key):
    def normal(index, *shape):
        return jax.random.normal(jax.random.fold_in(key, index), shape) / shape[-2] ** 0.5

    return {
        "router": normal(0, FEATURES, EXPERTS),
        "w_gate_up": normal(1, EXPERTS, FEATURES, 2 * HIDDEN),  # [E, K, N], gate and up side by side
        "w_down": normal(2, EXPERTS, HIDDEN, FEATURES),
    }


def layer(params, x):
    """Computes the layer by two grouped GEMMs, an activation and a sum; `jgg.moe_mlp` does all this in one call."""
    routing = jgg.route(x @ params["router"], TOPK)
    sizes, indices = routing.group_sizes, routing.gather_indices
    product = functools.partial(jgg.grouped_gemm, w_layout="ekn")
    pre_activation = product(x, params["w_gate_up"], sizes, TOPK, indices, permute_x=True)
    gate, up = jnp.split(pre_activation, 2, axis=1)
    y = product(
        jax.nn.silu(gate) * up,
        params["w_down"],
        sizes,
        TOPK,
        indices,
        permute_y=True,
        topk_weights=routing.topk_weights,
    )
    return jnp.sum(y.reshape(*x.shape[:1], TOPK, FEATURES), axis=1)


def fused_layer(params, x):
    """Computes the same as `layer`, with less memory for the backward pass."""
    routing = jgg.route(x @ params["router"], TOPK)
    return jgg.moe_mlp(x, params["w_gate_up"], params["w_down"], routing, w_layout="ekn")


@jax.jit
def step(params, x, target):
    def loss(params):
        return jnp.mean(jnp.square(fused_layer(params, x) - target))

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.3 * g, params, gradients), value


def main():
    params = init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (TOKENS, FEATURES))
    first_half = jnp.arange(FEATURES)[None, :] < FEATURES // 2
    target = jnp.where((x[:, :1] > 0) == first_half, -x, x)
    difference = jnp.max(jnp.abs(layer(params, x) - fused_layer(params, x)))
    print(f"largest difference between the two layers: {difference:.1e}")
    for index in range(101):
        params, loss = step(params, x, target)
        if index % 20 == 0:
            print(f"step {index}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
