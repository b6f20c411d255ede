"""A Flax NNX model with a mixture-of-experts layer, trained by Optax, with the losses that balance its experts.

python examples/flax_nnx.py    # on a GPU, or seconds on a CPU; needs `pip install '.[flax]'`
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jgg.nnx


class Model(nnx.Module):
    """Predicts the next of 16 symbols from one."""

    def __init__(self, features: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(16, features, rngs=rngs)
        self.moe = jgg.nnx.MoE(features, 32, num_experts=8, topk=2, rngs=rngs)
        self.head = nnx.Linear(features, 16, rngs=rngs)

    def __call__(self, symbols):
        x = self.embed(symbols)
        return self.head(x + self.moe(x))


@nnx.jit(donate_argnums=(0, 1))
def step(model, optimizer, symbols):
    def loss_of(model):
        logits, sown = nnx.capture(model, nnx.Intermediate)(symbols[:, :-1])
        loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, symbols[:, 1:]))
        metrics = {name: values[0] for name, values in sown["moe"].items()}
        balance = 0.01 * metrics["load_balancing_loss"] + 0.001 * metrics["router_z_loss"]
        return loss + balance, {"loss": loss, **metrics}

    gradients, metrics = nnx.grad(loss_of, has_aux=True)(model)
    optimizer.update(model, gradients)
    return metrics


def main():
    model = Model(24, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    rule = jax.random.permutation(jax.random.key(0), 16)  # each symbol's next
    symbols = [jnp.arange(64) % 16]
    for _ in range(8):
        symbols.append(rule[symbols[-1]])
    for index in range(41):
        metrics = step(model, optimizer, jnp.stack(symbols, axis=1))
        if index % 10 == 0:
            print(f"step {index}: loss {metrics['loss']:.3f}, rows of each expert {metrics['group_sizes']}")


if __name__ == "__main__":
    main()
