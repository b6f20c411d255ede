"""GRPO and its variants: advantages from rewards, the loss of a policy, and a `Trainer`'s batches and loss of both."""

from collections.abc import Callable, Mapping
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from jgg.core.arguments import check
from jgg.core.choices import AGGREGATIONS, IMPORTANCES, KL_ESTIMATORS, REWARD_SCALES
from jgg.models import Decoder
from jgg.models.rollouts import TrainingRows

type Batch = Mapping[str, jax.Array | np.ndarray]


class _PolicyOptions(TypedDict, total=False):
    """Options of `policy_loss`, but for the reference."""

    clip: tuple[float, float]
    delta: float | None
    importance: str
    kl_estimator: str


_EPSILON = 1e-4  # added to deviations, as in TRL


def advantages(rewards: ArrayLike, *, scale: str = "group") -> np.ndarray:
    """Returns how much better each answer is than the mean of its prompt's answers, float32 [P, S].

    Args:
      rewards: number [P, S], of S answers to each of P prompts, S at least 2.
      scale: what the differences are divided by: "group", the standard deviation of the prompt's rewards; "batch", the
        deviation of all rewards; "none", nothing. Deviations are those of a sample, with S - 1 in the denominator.

    Source: GRPO, https://arxiv.org/abs/2402.03300; "batch", https://arxiv.org/abs/2508.08221; "none", Dr. GRPO,
      https://arxiv.org/abs/2503.20783.
    """
    _check_choice("scale", scale, REWARD_SCALES)
    given = np.asarray(rewards, np.float64)
    is_right = given.ndim == 2 and given.shape[1] >= 2
    check(is_right, f"rewards must be [P, S] with S at least 2, got {list(given.shape)}.")
    centered = given - given.mean(axis=1, keepdims=True)
    if scale != "none":
        axis = 1 if scale == "group" else None
        centered /= given.std(axis=axis, ddof=1, keepdims=True) + _EPSILON
    return centered.astype(np.float32)


def token_weights(is_new: ArrayLike, aggregation: str = "token", *, max_length: int | None = None) -> np.ndarray:
    """Returns the weight of each token in the loss of a batch, float32 [R, W]; 0 where it is not learned.

    Args:
      is_new: bool [R, W], the tokens that are learned.
      aggregation: "token", the mean over all tokens of the batch; "sequence", the mean over answers of the means over
        their tokens; "constant", the sum divided by R times max_length.
      max_length: the most tokens of an answer, for "constant".

    Source: "token", DAPO, https://arxiv.org/abs/2503.14476; "sequence", GRPO, https://arxiv.org/abs/2402.03300;
      "constant", Dr. GRPO, https://arxiv.org/abs/2503.20783.
    """
    _check_choice("aggregation", aggregation, AGGREGATIONS)
    learned = np.asarray(is_new, bool)
    if aggregation == "token":
        divisor: np.ndarray = learned.sum(keepdims=True)
    elif aggregation == "sequence":
        divisor = len(learned) * learned.sum(axis=1, keepdims=True)
    else:
        check(max_length is not None, "max_length must be given for constant, got None.")
        divisor = len(learned) * np.asarray(max_length)
    return (learned / np.maximum(divisor, 1)).astype(np.float32)


def policy_loss(
    log_probabilities: jax.Array,
    old: jax.Array,
    advantages: jax.Array,
    weights: jax.Array,
    *,
    clip: tuple[float, float] = (0.2, 0.28),
    delta: float | None = None,
    importance: str = "token",
    reference: jax.Array | None = None,
    kl: float = 0.0,
    kl_estimator: str = "k3",
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the clipped loss of a policy, float32 [], and what is measured of it.

    With ratios r = exp(log_probabilities - old), it is the sum of weights times
    -min(min(r, delta) A, clip(r, 1 - low, 1 + high) A) + kl D.

    Args:
      log_probabilities: float32 [R, W], of the tokens by the policy that learns.
      old: float32 [R, W], those by the policy that sampled them.
      advantages: float32 [R], A of each answer.
      weights: float32 [R, W], from `token_weights`; tokens with the weight 0 are not learned, whatever they have.
      clip: low and high, the bounds of the ratio.
      delta: bound of the ratio where the advantage is negative, which the clipping leaves without one; above 1 + high.
      importance: "token", each token has its ratio; "sequence", all tokens of an answer have their geometric mean.
      reference: float32 [R, W], the log-probabilities by the reference model; None without a KL penalty.
      kl: weight of D, an estimate of the divergence from the reference by each token.
      kl_estimator: D by d = reference - log_probabilities: "k1", -d; "k2", d^2 / 2; "k3", exp(d) - d - 1. k1 has the
        gradient of k2: the mean of its own is 0, so it would penalize nothing.

    Returns: the loss, and means over the learned tokens by name: "clipped", the share of tokens whose gradient a bound
      takes away; "difference", the largest |log_probabilities - old|; and, with a reference, "kl".
    Source: two bounds, DAPO, https://arxiv.org/abs/2503.14476; delta, https://arxiv.org/abs/2505.07291; "sequence",
      GSPO, https://arxiv.org/abs/2507.18071; estimators, http://joschu.net/blog/kl-approx.html; the gradient of k1,
      https://arxiv.org/abs/2506.09477.
    """
    low, high = clip
    _check_choice("importance", importance, IMPORTANCES)
    _check_choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
    check(delta is None or delta > 1 + high, f"delta must be above 1 + high, {1 + high:g}, got {delta}.")
    learned, own = weights > 0, jax.lax.stop_gradient(advantages)[:, None]

    def mean(values: jax.Array, axis: int | None = None) -> jax.Array:
        count = jnp.sum(learned, axis, jnp.float32, keepdims=True)
        total = jnp.sum(jnp.where(learned, values, 0.0), axis, keepdims=True) / jnp.maximum(count, 1.0)
        return total if axis is not None else total[0, 0]

    differences = jnp.where(learned, log_probabilities - old, 0.0)
    ratios = jnp.exp(mean(differences, 1) if importance == "sequence" else differences)
    unclipped = ratios if delta is None else jnp.minimum(ratios, delta)
    gains = jnp.minimum(unclipped * own, jnp.clip(ratios, 1 - low, 1 + high) * own)
    is_clipped = ((own > 0) & (ratios > 1 + high)) | ((own < 0) & (ratios < 1 - low))
    if delta is not None:
        is_clipped |= (own < 0) & (ratios > delta)
    loss = -jnp.sum(weights * gains)
    metrics = {"clipped": mean(is_clipped.astype(jnp.float32)), "difference": jnp.max(jnp.abs(differences))}
    if reference is not None:
        divergence = _divergence(jnp.where(learned, reference - log_probabilities, 0.0), kl_estimator)
        loss += kl * jnp.sum(weights * divergence)
        metrics["kl"] = mean(divergence)
    return loss, metrics


def _divergence(d: jax.Array, estimator: str) -> jax.Array:
    """The estimate of each token, by the reference's log-probability less the policy's."""
    if estimator == "k3":
        return jnp.exp(d) - d - 1
    square = d * d / 2
    return square if estimator == "k2" else square - jax.lax.stop_gradient(d + square)


def batch_of(
    rows: TrainingRows,
    weights: ArrayLike,
    advantages: ArrayLike,
    *,
    parts: int = 1,
    replay: bool = False,
    at_temperature: bool = False,
) -> dict[str, np.ndarray]:
    """Returns a batch for a `Trainer` with `accumulate=True` and the loss of `loss_of`.

    Args:
      rows: sampled rows, from `Generated.training_rows`.
      weights: float32 [R, W], from `token_weights(rows.is_new)`.
      advantages: float32, R numbers, from `advantages`.
      parts: into how many parts of the same size the rows are divided; the loss stays the whole batch's.
      replay: whether the trainer uses the experts that the sampler chose.
      at_temperature: whether ratios are taken of the probabilities that the tokens were drawn with.
    """
    count = len(rows.tokens)
    check(count % parts == 0, f"parts must divide the {count} rows, got {parts}.")
    old = rows.sampled_log_probabilities if at_temperature else rows.log_probabilities
    arrays: dict[str, ArrayLike] = {"tokens": rows.tokens, "targets": rows.targets, "mask": rows.mask, "old": old}
    if replay:
        arrays["topk_indices"] = np.moveaxis(np.asarray(rows.topk_indices), 1, 0)  # rows first, as in all arrays
    # a step has the mean of the parts' losses and metrics
    places = np.repeat(parts * np.eye(parts, dtype=np.float32), count // parts, axis=0)
    arrays |= {"weights": parts * np.asarray(weights, np.float32), "places": places}
    arrays["advantages"] = np.asarray(advantages, np.float32).reshape(count)
    batch = {name: np.asarray(array) for name, array in arrays.items()}
    return {name: array.reshape(parts, count // parts, *array.shape[1:]) for name, array in batch.items()}


def loss_of(
    *, kl: float = 0.0, temperature: float = 1.0, **options: Unpack[_PolicyOptions]
) -> Callable[[Decoder, Batch], tuple[jax.Array, dict[str, jax.Array]]]:
    """Returns a loss for `Trainer`, for batches of `batch_of`.

    Args:
      kl: as in `policy_loss`; above 0, the model must have adapters: without them it is the reference.
      temperature: the sampler's, at which the log-probabilities are computed.
      options: others of `policy_loss`.

    Returns:
      loss(model, batch) -> (loss, metrics). The metrics are "tokens", the number of learned tokens; "clipped",
      "entropy" and, with kl, "kl", sums over these tokens; and "differences", float32 [parts], the largest difference
      between sampler and trainer in each part. A step has the means of these over its parts.
    """

    def loss(model: Decoder, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        inputs = batch["tokens"], batch["targets"]
        mask = jnp.asarray(batch["mask"])
        choices = jnp.moveaxis(batch["topk_indices"], 1, 0) if "topk_indices" in batch else None

        def losses_of(model: Decoder) -> jax.Array:
            return model.losses(*inputs, topk_indices=choices, entropies=True, mask=mask, temperature=temperature)

        losses, sown = nnx.capture(losses_of, nnx.Intermediate)(model)
        reference = None
        if kl:
            without = model.losses(*inputs, adapters=False, mask=mask, temperature=temperature)
            reference = -jax.lax.stop_gradient(without)
        old, advantages, weights = (jnp.asarray(batch[name]) for name in ("old", "advantages", "weights"))
        value, metrics = policy_loss(-losses, old, advantages, weights, kl=kl, reference=reference, **options)
        learned, (entropies,) = weights > 0, sown["entropies"]
        differences, tokens = batch["places"][0] * metrics.pop("difference"), jnp.sum(learned).astype(jnp.float32)
        sums = {name: tokens * each for name, each in metrics.items()}
        sums |= {"tokens": tokens, "entropy": jnp.sum(jnp.where(learned, entropies, 0.0))}
        return value, sums | {"differences": differences}

    return loss


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    check(value in choices, f"{name} must be one of {', '.join(choices)}, got {value!r}.")
