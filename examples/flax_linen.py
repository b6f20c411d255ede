"""A Flax Linen model with a mixture-of-experts layer; a selection bias balances the experts, as in DeepSeek-V3.

python examples/flax_linen.py    # on a GPU, or seconds on a CPU; needs `pip install '.[flax]'`
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jgg.linen


class Model(nn.Module):
    """Predicts the next of 16 symbols from one."""

    features: int

    @nn.compact
    def __call__(self, symbols):
        x = nn.Embed(16, self.features)(symbols)
        moe = jgg.linen.MoE(32, num_experts=8, topk=2, score="sigmoid", use_selection_bias=True, name="moe")
        return nn.Dense(16)(x + moe(x))


MODEL, OPTIMIZER = Model(24), optax.adam(1e-2)


@jax.jit
def step(params, router, state, symbols):
    def loss_of(params):
        variables = {"params": params, "router": router}
        logits, sown = MODEL.apply(variables, symbols[:, :-1], mutable=["intermediates"])
        loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, symbols[:, 1:]))
        return loss, sown["intermediates"]["moe"]["group_sizes"][0]

    (loss, sizes), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
    updates, state = OPTIMIZER.update(gradients, state)
    bias = jgg.update_selection_bias(router["moe"]["selection_bias"], sizes, 0.01)  # no gradient: a rule of its own
    return optax.apply_updates(params, updates), {"moe": {"selection_bias": bias}}, state, loss, sizes


def main():
    rule = jax.random.permutation(jax.random.key(0), 16)  # each symbol's next
    symbols = [jnp.arange(64) % 16]
    for _ in range(8):
        symbols.append(rule[symbols[-1]])
    symbols = jnp.stack(symbols, axis=1)
    variables = jax.jit(MODEL.init)(jax.random.key(1), symbols)
    params, router = variables["params"], variables["router"]
    state = OPTIMIZER.init(params)
    for index in range(41):
        params, router, state, loss, sizes = step(params, router, state, symbols)
        if index % 10 == 0:
            print(f"step {index}: loss {loss:.3f}, rows of each expert {sizes}")


if __name__ == "__main__":
    main()
