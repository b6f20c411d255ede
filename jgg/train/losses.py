"""The loss of a language model on batches of texts, for training and for held-out data."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jgg.core.arguments import check_instance
from jgg.hf.settings import language_model
from jgg.models import Decoder, ModelConfig
from jgg.train.loop import on_devices

type Batch = Mapping[str, jax.Array | np.ndarray]


def balance_weight(config: ModelConfig) -> float:
    """The weight of the routers' balancing loss: `router_aux_loss_coef` in config.json, or in its "text_config".

    The loss in transformers is top-k times jgg's, so the weight is the coefficient times top-k.

    Raises: ValueError: the coefficient is neither null nor a number of at least 0.
    """
    check_instance("config", config, ModelConfig, "a ModelConfig, as jgg.models.model_config returns it")
    coefficient = language_model(config.hf).get("router_aux_loss_coef")
    coefficient = 0 if coefficient is None else coefficient
    if isinstance(coefficient, bool) or not isinstance(coefficient, int | float) or not 0 <= coefficient < math.inf:
        raise ValueError(f"router_aux_loss_coef must be a number of at least 0 or null, got {coefficient!r}")
    return float(coefficient * config.moe.topk)


def next_token_loss(
    *, packed: bool = True, balance_weight: float = 0.0
) -> Callable[[Decoder, Batch], tuple[jax.Array, dict[str, jax.Array]]]:
    """Returns a loss for `Trainer`, for batches with "tokens", "targets", "segments" and "weights", each [B, S].

    Args:
      packed: whether a sequence may contain several examples, told apart by "segments", int32, 0 for padding at the
        end. With one example per sequence, causal attention never sees the padding that follows it.
      balance_weight: the weight of the routers' balancing loss, the mean over layers.

    Returns:
      loss(model, batch) -> (loss, metrics). The loss, float32 [], is the sum of the targets' losses times their
      "weights", plus balance_weight times the balancing loss. The metrics are "loss", float32 [], without the balancing
      loss, "load", float32 [layers with experts], the rows of the fullest expert over the mean of all experts, and
      "overflow", int32 [layers with experts], the rows that found no room in the buffers of a sharded layer.
    """

    def loss(model: Decoder, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        call, is_real = nnx.capture(model.loss, nnx.Intermediate), batch["segments"] > 0
        segments = batch["segments"] if packed else None
        learned, sown = call(batch["tokens"], batch["targets"], segments, weights=batch["weights"], mask=is_real)
        (balance,), (group_sizes,), (overflow,) = (
            sown[name] for name in ("load_balancing_loss", "group_sizes", "overflow")
        )
        sizes = group_sizes.astype(jnp.float32)
        load = jnp.max(sizes, axis=-1) / jnp.maximum(jnp.mean(sizes, axis=-1), 1e-9)
        return learned + balance_weight * jnp.mean(balance), {"loss": learned, "load": load, "overflow": overflow}

    return loss


def held_out_loss(
    model: Decoder,
    batches: Iterable[Batch],
    *,
    packed: bool = True,
    batch_sharding: jax.sharding.Sharding | None = None,
) -> float:
    """Computes the mean loss of the targets of all batches, weighted by the targets' weights.

    `math.exp` of it is the perplexity.

    Args:
      model: the model. Measuring it again with batches of the same shapes compiles nothing.
      batches: as `next_token_loss` takes them, of NumPy arrays that each process has whole; they may have further first
        axes, such as an axis of parts. The weights of different batches must be comparable, as those of
        `jgg.data.batches(..., seed=None, normalize=False)` are.
      packed: as in `next_token_loss`.
      batch_sharding: how devices split arrays [B, S] if the model has a sharding.

    Raises: ValueError: no target has a weight above 0.
    """
    losses, weights = 0.0, 0.0
    for batch in batches:
        flat = {name: np.asarray(array).reshape(-1, *array.shape[-2:]) for name, array in batch.items()}
        for number in range(len(flat["tokens"])):
            part = {name: array[number] for name, array in flat.items()}
            weights += float(np.sum(part["weights"], dtype=np.float64))
            placed = part if batch_sharding is None else on_devices(part, batch_sharding)
            losses += float(_sum_of_losses(model, placed, packed))
    if not weights:
        raise ValueError("batches must have targets with a weight above 0, got none")
    return losses / weights


def perplexity_of(loss: float) -> float:
    """exp(loss), or a number near the largest float if exp(loss) would exceed it."""
    return math.exp(min(loss, 700.0))


@functools.partial(jax.jit, static_argnums=2)
def _sum_of_losses(model: Decoder, part: Batch, packed: bool) -> jax.Array:
    segments = part["segments"] if packed else None
    return model.loss(part["tokens"], part["targets"], segments, weights=part["weights"], mask=part["segments"] > 0)
