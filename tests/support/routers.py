"""Routers in NumPy, one token at a time, as `jgg.route` should be."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

import jgg

# compiled, as models call them, and quicker here than one operation at a time
STATIC = ("topk", "score", "normalize", "scale", "num_groups", "topk_groups", "scores_per_group", "implementation")
route = jax.jit(jgg.route, static_argnames=STATIC)


def softmax(x):
    exponentials = np.exp(x - max(x))
    return exponentials / sum(exponentials)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def best(scores, count, among=None):
    """Indices of the `count` highest scores, of equals the lower first."""
    among = range(len(scores)) if among is None else among
    return sorted(among, key=lambda e: (-scores[e], e))[:count]


def best_groups(scores, num_groups, topk_groups, scores_per_group):
    """The experts of the groups whose best scores have the highest sums."""
    group_size = len(scores) // num_groups
    sums = [sum(sorted(group)[-scores_per_group:]) for group in np.split(scores, num_groups)]
    return [group * group_size + i for group in best(sums, topk_groups) for i in range(group_size)]


# One token's router of each family of models, in float64: its experts and their weights. `biased` is what the experts
# are chosen by.


def mixtral(logits, topk):
    """Also gpt-oss and Granite-MoE: a softmax of the chosen logits."""
    experts = best(logits, topk)
    return experts, softmax(logits[experts])


def qwen3(logits, topk):
    scores = softmax(logits)
    experts = best(scores, topk)
    return experts, scores[experts] / sum(scores[experts])


def olmoe(logits, topk):
    scores = softmax(logits)
    experts = best(scores, topk)
    return experts, scores[experts]


def deepseek_v2(logits, topk, *, scale, num_groups, topk_groups, scores_per_group=1):
    scores = softmax(logits)
    experts = best(scores, topk, best_groups(scores, num_groups, topk_groups, scores_per_group))
    return experts, scores[experts] * scale


def deepseek_v3(logits, topk, *, scale, selection_bias, num_groups=1, topk_groups=1, scores_per_group=2):
    """Also Kimi-K2 and GLM-4.5, which have one group."""
    scores = sigmoid(logits)
    biased = scores + selection_bias
    experts = best(biased, topk, best_groups(biased, num_groups, topk_groups, scores_per_group))
    return experts, scores[experts] / (sum(scores[experts]) + 1e-20) * scale


def llama4(logits, topk):
    experts = best(logits, topk)
    return experts, sigmoid(logits[experts])


def biased_softmax(logits, topk, *, selection_bias):
    scores = softmax(logits)
    experts = best(scores + selection_bias, topk)
    return experts, scores[experts] / sum(scores[experts])


def biased_topk_softmax(logits, topk, *, selection_bias, num_groups, topk_groups, scores_per_group=1):
    biased = logits + selection_bias
    experts = best(biased, topk, best_groups(biased, num_groups, topk_groups, scores_per_group))
    return experts, softmax(logits[experts])


def bias(num_experts, spread, mean=0.0):
    """Float32 numbers, different and out of order."""
    return (mean + spread * np.random.default_rng(7).standard_normal(num_experts)).astype(np.float32)


V3 = {"scale": 2.5, "selection_bias": bias(16, 0.3), "num_groups": 4, "topk_groups": 2}
SIGMOID = {"score": "sigmoid"}
SMALL_SIGMOID = {"score": "sigmoid", "normalize": False}
# name: the reference, its options, T, E, k, and what route needs besides these options
FAMILIES = {
    "mixtral": (mixtral, {}, 40, 8, 2, {"score": "topk_softmax"}),
    "gpt-oss": (mixtral, {}, 40, 128, 4, {"score": "topk_softmax"}),
    "qwen3": (qwen3, {}, 40, 16, 4, {}),
    "qwen3-next": (qwen3, {}, 9, 512, 10, {}),
    "olmoe": (olmoe, {}, 40, 64, 8, {"normalize": False}),
    "switch": (olmoe, {}, 40, 8, 1, {}),
    "deepseek-v2": (deepseek_v2, {"scale": 16.0, "num_groups": 8, "topk_groups": 3}, 40, 160, 6, {"normalize": False}),
    "deepseek-v3": (deepseek_v3, V3, 200, 16, 4, SIGMOID),
    "negative-bias": (deepseek_v3, V3 | {"selection_bias": bias(16, 0.3, -2.0)}, 200, 16, 4, SIGMOID),
    "all-of-the-groups": (deepseek_v3, V3, 40, 16, 8, SIGMOID),
    "every-group": (deepseek_v3, V3 | {"topk_groups": 4}, 40, 16, 4, SIGMOID),
    "groups-of-one": (deepseek_v3, V3 | {"num_groups": 16, "topk_groups": 5}, 40, 16, 3, SIGMOID),
    "kimi-k2": (deepseek_v3, {"scale": 2.827, "selection_bias": bias(384, 0.1)}, 20, 384, 8, SIGMOID),
    "no-bias": (deepseek_v3, V3 | {"selection_bias": 0.0}, 200, 16, 4, SIGMOID | {"selection_bias": None}),
    "llama4": (llama4, {}, 40, 16, 1, SMALL_SIGMOID),
    "one-sigmoid": (llama4, {}, 40, 16, 1, SIGMOID),
    "softmax-bias": (biased_softmax, {"selection_bias": bias(16, 0.2)}, 200, 16, 4, {}),
    "topk-softmax-groups": (
        biased_topk_softmax,
        {"selection_bias": bias(16, 1.0), "num_groups": 4, "topk_groups": 2},
        200,
        16,
        4,
        {"score": "topk_softmax"},
    ),
    # Megatron Core and Transformer Engine rank a group by k // topk_groups scores
    "megatron": (deepseek_v3, V3 | {"scores_per_group": 3}, 200, 16, 6, SIGMOID),
    "megatron-one-score": (deepseek_v3, V3 | {"scores_per_group": 1}, 200, 16, 2, SIGMOID),
    "megatron-softmax": (
        deepseek_v2,
        {"scale": 1.5, "num_groups": 4, "topk_groups": 2, "scores_per_group": 4},
        200,
        32,
        8,
        {"normalize": False},
    ),
    "megatron-logits": (
        biased_topk_softmax,
        {"selection_bias": bias(16, 1.0), "num_groups": 4, "topk_groups": 2, "scores_per_group": 2},
        200,
        16,
        4,
        {"score": "topk_softmax"},
    ),
    "one-expert": (olmoe, {}, 5, 1, 1, {"normalize": False}),
    "every-expert": (qwen3, {}, 5, 6, 6, {}),
    "no-token": (mixtral, {}, 0, 8, 2, {"score": "topk_softmax"}),
    "no-token-groups": (deepseek_v3, V3, 0, 16, 4, SIGMOID),
}


def reference_route(logits, topk, family, options):
    tokens = [family(token, topk, **options) for token in np.asarray(logits).astype(np.float64)]
    experts = np.array([experts for experts, _ in tokens]).reshape(-1, topk)
    return np.array([weights for _, weights in tokens]).reshape(-1, topk), experts


def reference_sort(topk_indices, num_experts):
    experts = np.asarray(topk_indices).reshape(-1).tolist()
    in_order = [[row for row, e in enumerate(experts) if e == expert] for expert in range(num_experts)]
    past = [row for row, e in enumerate(experts) if not 0 <= e < num_experts]
    return [len(rows) for rows in in_order], [*itertools.chain(*in_order), *past]


def assert_routed(routing, logits, topk, family, options):
    weights, experts = reference_route(logits, topk, family, options)
    np.testing.assert_array_equal(routing.topk_indices, experts)
    np.testing.assert_allclose(routing.topk_weights, weights, rtol=1e-5)
    sizes, indices = reference_sort(experts, logits.shape[1])
    np.testing.assert_array_equal(routing.group_sizes, sizes)
    np.testing.assert_array_equal(routing.gather_indices, indices)
    assert [leaf.dtype for leaf in routing] == [jnp.float32, jnp.int32, jnp.int32, jnp.int32]


def random_logits(num_tokens, num_experts, dtype="float32"):
    """No token has two equal logits, in bfloat16 neither."""
    rng = np.random.default_rng(num_experts)
    ranks = rng.permuted(np.tile(np.arange(num_experts), (num_tokens, 1)), axis=1)
    spread = rng.uniform(0.5, 2.0, (num_tokens, 1))
    if dtype == "bfloat16":
        return jnp.asarray(ranks / 8 - num_experts / 16, dtype)
    return jnp.asarray(spread * (ranks - num_experts / 2) * 6 / num_experts, dtype)


BAD_TOKENS = {
    "nan": [np.nan, 1, 2, 3, 4, 5, 6, 7],
    "negative-nan": [0, 1, 2, -np.float32(np.nan), 4, 5, 6, 7],
    "all-nan": [np.nan] * 8,
    "inf": [0, 1, np.inf, 3, np.inf, 5, 6, 7],
    "minus-inf": [-np.inf] * 8,
    "mixed-nan": [np.nan, -np.inf, np.inf, 3, 4, 5, np.nan, -np.inf],
}
