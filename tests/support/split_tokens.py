"""Functions of tokens that plain `jax.jit` splits over devices as these do not divide them, against one device."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import jgg
from jgg.models.attention import Cache
from jgg.models.embedding import embed
from tests.support.closeness import assert_close

EXPERTS, TOPK = 8, 2
MESHES = {(4, 2): ("a", "b"), (2, 2, 2): ("a", "b", "c"), (8,): ("a",)}
GIVEN = {"topk_indices": [[-1, 3], [9, -1], [5, 5], [0, -1], [-1, -1]]}
# how logits become weights, each in another way
ROUTERS = (
    {},
    {"normalize": False},
    {"score": "sigmoid"},
    {"score": "sigmoid", "normalize": False, "num_groups": 4, "topk_groups": 2},
    GIVEN,
)


def mesh_of(shape):
    kinds = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, MESHES[shape], axis_types=kinds)


def router_gradients(logits, split):
    """The gradient of each router's weights, which are split directly or after padding to a multiple of 8."""

    def loss(logits, options, pads):
        weights = jgg.route(logits, TOPK, **options).topk_weights
        if pads:
            weights = jnp.pad(weights, ((0, -len(weights) % 8), (0, 0)))
        weights = split(weights)
        return jnp.sum(weights * jnp.cos(jnp.arange(weights.size)).reshape(weights.shape))

    gradients = {}
    for options, (pads, count) in itertools.product(ROUTERS, ((False, 5), (True, 3))):
        own = {name: jnp.asarray(value)[:count] if name in GIVEN else value for name, value in options.items()}
        gradients[f"{options} of {count}, {pads}"] = jax.grad(loss)(logits[:count], own, pads)
    return gradients


def check_router(meshes):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((5, EXPERTS)), jnp.float32)
    want = jax.jit(functools.partial(router_gradients, split=lambda array: array))(logits)
    for shape in meshes:
        sharding = jax.NamedSharding(mesh_of(shape), jax.P("a"))
        constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
        assert_close(jax.jit(functools.partial(router_gradients, split=constrain))(logits), want, name=f"{shape}")


def reads_and_writes(floats, numbers, split):
    """What else of jgg reads or writes rows by index, with arrays that are split: values and gradients."""
    table, rows = floats
    tokens, positions = split(numbers), split(jnp.broadcast_to(jnp.arange(1, 3), numbers.shape))

    def loss(table):
        return jnp.sum(jnp.exp(split(jnp.exp(embed(table, tokens)))))

    def balance(logits):
        chosen = split(jgg.route(logits, TOPK).topk_indices)
        return jgg.load_balancing_loss(split(logits), chosen, mask=split(numbers[:, 0])) + jgg.router_z_loss(
            split(logits)
        )

    keys = split(jnp.exp(rows))[:, :, None]
    cache = Cache(*[jnp.zeros((2, len(rows), 4, 1, rows.shape[2]), jnp.float32)] * 2)
    return {
        "embeddings": jax.grad(loss)(table),
        "balance": jax.value_and_grad(balance)(rows[:, 0]),
        "cache": cache.write(jnp.int32(1), positions, keys, keys),
    }


def check_reads_and_writes(meshes):
    rng = np.random.default_rng(0)
    floats = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((7, EXPERTS), (3, 2, EXPERTS))]
    numbers = jnp.asarray([[0, 3], [5, 0], [6, -7]], jnp.int32)
    want = jax.jit(functools.partial(reads_and_writes, split=lambda array: array))(floats, numbers)
    for shape in meshes:
        names = MESHES[shape]
        for spec in {names[:1], names}:
            sharding = jax.NamedSharding(mesh_of(shape), jax.P(spec))
            constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
            got = jax.jit(functools.partial(reads_and_writes, split=constrain))(floats, numbers)
            assert_close(got, want, name=f"{shape}, {spec}")


# name: (function, its array, how 8 devices along one axis or 4 of them split it); parts of the axis split what follows
OVER_PARTS_OF_AN_AXIS = {
    "16 experts in 4 groups": (functools.partial(jgg.route, topk=2, num_groups=4, topk_groups=2), (4, 16), (None, "a")),
    "the same by sigmoid": (
        functools.partial(jgg.route, topk=2, score="sigmoid", num_groups=4, topk_groups=2),
        (4, 16),
        (None, "a"),
    ),
    "6 tokens": (functools.partial(jgg.route, topk=2), (6, 16), ("a",)),
    "2 tokens of chosen experts": (functools.partial(jgg.sort_by_expert, num_experts=4), (2, 3), ("a",)),
    "6 tokens of chosen experts": (functools.partial(jgg.sort_by_expert, num_experts=4), (6, 2), ("a",)),
    "6 tokens and a loss": (
        lambda logits: jgg.load_balancing_loss(logits, jgg.route(logits, 2).topk_indices),
        (6, 16),
        ("a",),
    ),
}


def check_parts_of_an_axis():
    for name, (function, shape, spec) in OVER_PARTS_OF_AN_AXIS.items():
        array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        array = np.abs(2 * array).astype(np.int32) if "chosen" in name else array
        sharding = jax.NamedSharding(mesh_of((8,)), jax.P(*spec))
        split = jax.jit(lambda array: function(jax.lax.with_sharding_constraint(array, sharding)))  # noqa: B023
        assert_close(split(array), jax.jit(function)(array), name=name)
