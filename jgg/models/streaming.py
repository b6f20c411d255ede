"""`Stream`: new tokens chunk by chunk, with what is known of their rows."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jgg.core.arguments import as_array, check
from jgg.models import decoding
from jgg.models.decoder import Decoder
from jgg.models.placement import on_host
from jgg.models.requests import Asked
from jgg.models.rollouts import Generated
from jgg.models.rows import New, State


class Stream(Iterator[np.ndarray]):
    """New tokens as they come, int32 [R, n] each time, of R = B * num_samples rows; `jgg.models.stream` makes it.

    A row that has ended repeats its last token, as in `generate`. Do not change the model before the stream has ended.

    Attributes:
      tokens: int32 [R, N], the new tokens so far.
      lengths: int32 [R], how many new tokens each row has so far, including the one that ended it.
      max_new_tokens: how many new tokens there are at most.
      is_done: bool [R], the rows that have ended: by a stop token, by `end`, or because their logits are NaN.
    """

    def __init__(self, model: Decoder, asked: Asked, chunk: int) -> None:
        self._asked, self._chunk = asked, chunk
        self.max_new_tokens = asked.new_tokens
        self._split = decoding.split_model(model)
        self._state: State | None = None
        self._ended = np.zeros(len(asked.prompts) * asked.plan.num_samples, bool)
        self._ended[asked.rows :] = True  # nobody waits for the copies of a prompt
        self.tokens = np.zeros((asked.rows, 0), np.int32)
        self.lengths = np.zeros(asked.rows, np.int32)
        self.is_done = np.zeros(asked.rows, bool)

    def __next__(self) -> np.ndarray:
        before = self.tokens.shape[1]
        if self.is_done.all() or before == self.max_new_tokens:
            raise StopIteration
        request, plan = self._asked.request, self._asked.plan
        state = self._state
        if state is None:
            state = decoding.start(*self._split, self._asked.prompts, request, plan=plan)
        else:
            limit = jnp.int32(min(before + self._chunk, self.max_new_tokens))
            state = decoding.advance(*self._split, state, request.stops, self._ended, limit, plan=plan)
        self._state = state
        rows = self._asked.rows
        # copies, as the next program may write where these are
        tokens, filled, lengths, is_done = (np.array(on_host(each)) for each in (*state.new[:3], state.is_done))
        self.tokens, self.lengths = tokens[:rows, : filled.max()], lengths[:rows]
        self.is_done = is_done[:rows] | self._ended[:rows]
        return self.tokens[:, before:]

    def end(self, rows: ArrayLike) -> None:
        """Ends rows, bool [R], which get no further tokens: the stream ends once all rows have."""
        ended = np.asarray(as_array("rows", rows))
        is_right = ended.dtype == bool and ended.shape == self.is_done.shape
        check(is_right, f"rows must be bool [R], [{len(self.is_done)}], got {ended.dtype} {list(ended.shape)}.")
        self._ended[: self._asked.rows] |= ended
        self.is_done = self.is_done | ended

    def result(self) -> jax.Array | Generated:
        """What `generate` returns for the new tokens so far; there must be at least one.

        A row that `end` ended keeps the length it had at that point.
        """
        check(self._state is not None, "result must be called after the first tokens have come, got none.")
        assert self._state is not None
        # copies, as the state may have these very arrays, and is gone once the stream goes on
        return jax.tree.map(jnp.copy, result_of(self._state.new, self._asked, self.tokens.shape[1]))


def result_of(new: New, asked: Asked, new_tokens: int) -> jax.Array | Generated:
    """What `generate` returns for this many of the new tokens."""
    rows, record = asked.rows, new.record
    if record is None:
        return new.tokens[:rows, :new_tokens]
    return Generated(
        new.tokens[:rows, :new_tokens],
        new.lengths[:rows],
        record.log_probabilities[:rows, :new_tokens],
        record.sampled_log_probabilities[:rows, :new_tokens],
        record.topk_indices[:, :rows, : asked.prompts.shape[1] + new_tokens],
    )
