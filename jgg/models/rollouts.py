"""`Generated`: new tokens with what reinforcement learning needs to know about them, and rows for a trainer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jgg.core.arguments import check
from jgg.core.schedule import saturated_int32
from jgg.models.placement import on_host
from jgg.models.token_arrays import as_integers


class TrainingRows(NamedTuple):
    """Prompts followed by their new tokens, as R rows of W = S + N tokens.

    Attributes:
      tokens: int32 [R, W], each prompt, directly followed by its new tokens, then zeros.
      targets: int32 [R, W], the token that follows each of `tokens`, then zeros.
      mask: bool [R, W], the tokens that another token follows: the `mask` of `Decoder.losses`.
      is_new: bool [R, W], where the target is a new token, whose loss counts.
      log_probabilities, sampled_log_probabilities: float32 [R, W], of the targets that are new; 0 elsewhere.
      topk_indices: int32 [L, R, W, k], the experts of `tokens`; -1 where there is none.
    """

    tokens: jax.Array
    targets: jax.Array
    mask: jax.Array
    is_new: jax.Array
    log_probabilities: jax.Array
    sampled_log_probabilities: jax.Array
    topk_indices: jax.Array


class Generated(NamedTuple):
    """What `generate` returns with `details=True`: R = B * num_samples rows, a prompt's next to each other.

    Attributes:
      tokens: int32 [R, N], the new tokens; a row that has ended repeats its last one.
      lengths: int32 [R], how many new tokens a row has, including the one that ended it, excluding any -1 for NaN.
      log_probabilities: float32 [R, N], the log of each new token's probability under the model's own logits, which is
        the negative of `Decoder.losses`. 0 past a row's length.
      sampled_log_probabilities: float32 [R, N], the same under the distribution that the token was drawn from, after
        temperature, top_k and top_p. 0 if the temperature is 0, and past a row's length.
      topk_indices: int32 [L, R, S + N, k], the experts that each token of the prompt and each new token went to, in the
        L layers that have experts. The prompt's start at 0, and the new tokens' follow directly. -1 for tokens that did
        not run through the model, such as a row's last new token.
    """

    tokens: jax.Array
    lengths: jax.Array
    log_probabilities: jax.Array
    sampled_log_probabilities: jax.Array
    topk_indices: jax.Array

    def training_rows(self, prompts: ArrayLike, lengths: ArrayLike | None = None) -> TrainingRows:
        """Arranges prompts and new tokens as rows for a trainer.

        With `rows = generated.training_rows(prompts, lengths)`, the losses
        `model.losses(rows.tokens, rows.targets, mask=rows.mask, topk_indices=rows.topk_indices)` are
        `-rows.log_probabilities` where `rows.is_new`.

        Args:
          prompts: integer [B, S], as passed to `generate`.
          lengths: integer [B], as passed to `generate`.

        Raises: ValueError, TypeError: the prompts or lengths cannot be the ones that `generate` was called with.
        """
        prompts = saturated_int32(as_integers("prompts", prompts, "[B, S]")[0])
        (rows, new), width = self.tokens.shape, self.topk_indices.shape[2]
        batch, longest = prompts.shape
        is_alike = longest == width - new and rows % max(1, batch) == 0 and (batch > 0 or rows == 0)
        expected = f"those of generate, [B, {width - new}] with B a divisor of {rows}"
        check(is_alike, f"prompts must be {expected}, got {[batch, longest]}.")
        given, known = as_integers("lengths", np.full(batch, longest) if lengths is None else lengths, "[B]")
        check(given.shape == (batch,), f"lengths must be [B], [{batch}], got {list(given.shape)}.")
        num_samples = rows // max(1, batch)
        if known is not None and not isinstance(self.topk_indices, Tracer):
            self._check_lengths(np.repeat(known, num_samples), known)
        starts = jnp.repeat(jnp.clip(saturated_int32(given), 1, longest), num_samples)[:, None]  # [R, 1]
        ends = starts + self.lengths[:, None]
        columns = jnp.arange(width, dtype=jnp.int32)[None]

        def of_new(array: jax.Array, first: jax.Array) -> jax.Array:
            """What new tokens have, in columns from `first` on."""
            return jnp.take_along_axis(array, jnp.clip(columns - first, 0, new - 1), axis=1)

        padded = jnp.pad(jnp.repeat(prompts, num_samples, axis=0), ((0, 0), (0, new)))
        tokens = jnp.where(columns < starts, padded, of_new(self.tokens, starts))
        tokens = jnp.where(columns < ends, tokens, 0)
        mask = columns < ends - 1
        is_new = mask & (columns >= starts - 1)
        return TrainingRows(
            tokens,
            jnp.where(mask, jnp.roll(tokens, -1, axis=1), 0),
            mask,
            is_new,
            jnp.where(is_new, of_new(self.log_probabilities, starts - 1), 0.0),
            jnp.where(is_new, of_new(self.sampled_log_probabilities, starts - 1), 0.0),
            self.topk_indices,
        )

    def _check_lengths(self, starts: np.ndarray, lengths: np.ndarray) -> None:
        """Raises ValueError unless prompts of the lengths [B], `starts` [R] for each row, gave these choices.

        The last new token of a row did not run through the model. Rows that ended with NaN are not looked at.
        """
        has_run = on_host(jnp.sum(self.topk_indices[0, :, :, 0] >= 0, axis=1))
        is_nan = on_host(jnp.any(self.tokens < 0, axis=1))
        is_right = is_nan | (has_run == starts + on_host(self.lengths) - 1)
        check(is_right.all(), f"lengths must be those of generate, got {lengths.tolist()}.")
