"""Trains a small language model of Levanter's experts, computed by jgg.

    python examples/levanter_moe.py                       # by jgg
    python examples/levanter_moe.py --experts levanter    # the same by Levanter alone

The experts are `levanter.grug.grug_moe.MoEExpertMlp`, an Equinox module, in its implementation "scatter", which runs on
one device. The model learns which letter comes next in a rhyme. Needs what docs/integrations.md installs for Levanter.
"""

import argparse
import logging

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from levanter.grug.grug_moe import MoEExpertMlp

import jgg.integrations.levanter

TEXT = "how much wood would a woodchuck chuck if a woodchuck could chuck wood? " * 4
FEATURES, HIDDEN, EXPERTS, TOPK, LAYERS, CONTEXT = 64, 96, 8, 2, 2, 3


class Layer(eqx.Module):
    """Adds what the experts of a router's choice give."""

    w_router: jax.Array
    experts: MoEExpertMlp

    def __init__(self, key):
        router, experts = jax.random.split(key)
        self.w_router = jax.random.normal(router, (FEATURES, EXPERTS)) / FEATURES**0.5
        sizes = {"num_experts": EXPERTS, "hidden_dim": FEATURES, "intermediate_dim": HIDDEN}
        options = {"initializer_std": FEATURES**-0.5, "implementation": "scatter"}
        self.experts = MoEExpertMlp.init(**sizes, **options, key=experts)

    def __call__(self, x):
        normalized = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(normalized @ self.w_router), TOPK)
        weights /= jnp.sum(weights, axis=-1, keepdims=True)
        return x + self.experts(normalized, chosen, weights)


class Model(eqx.Module):
    """Logits of the next letter, by the letters before it."""

    w_embedding: jax.Array
    layers: list[Layer]
    w_head: jax.Array

    def __init__(self, letters, key):
        keys = jax.random.split(key, LAYERS + 2)
        self.w_embedding = jax.random.normal(keys[0], (CONTEXT, letters, FEATURES))
        self.layers = [Layer(own) for own in keys[2:]]
        self.w_head = jax.random.normal(keys[1], (FEATURES, letters)) / FEATURES**0.5

    def __call__(self, tokens):  # [T, CONTEXT]
        x = sum(self.w_embedding[place][tokens[:, place]] for place in range(CONTEXT))
        for layer in self.layers:
            x = layer(x)
        return x @ self.w_head


def loss_of(model, tokens, targets):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", choices=("jgg", "levanter"), default="jgg")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    if options.experts == "jgg":
        jgg.integrations.levanter.install()
    letters = sorted(set(TEXT))
    ids = jnp.array([letters.index(letter) for letter in TEXT], jnp.int32)
    tokens = jnp.stack([ids[place : place - CONTEXT] for place in range(CONTEXT)], axis=1)
    targets = ids[CONTEXT:]
    model = Model(len(letters), jax.random.key(0))
    optimizer = optax.adam(3e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, state):
        loss, gradients = eqx.filter_value_and_grad(loss_of)(model, tokens, targets)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(model, updates), state, loss

    for number in range(options.steps):
        model, state, loss = step(model, state)
        if number % 10 == 0 or number == options.steps - 1:
            print(f"step {number}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    logging.getLogger("jgg").setLevel(logging.INFO)  # logs which kernels compute
    main()
