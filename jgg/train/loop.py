"""`Trainer`: the loop of training, for any model of Flax NNX, loss, optimizer of optax and batches."""

import functools
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jgg.core.arguments import as_int, check_instance
from jgg.sharding import MoESharding
from jgg.train.checkpoints import TrainingError, opened, restored, save
from jgg.train.compiling import compiler_options
from jgg.train.meter import Meter, Speed
from jgg.train.preemption import Preempted, stop_notices

Batch = Any  # a pytree of arrays


class Record(NamedTuple):
    """What some steps measured, those since the record before.

    Attributes:
      step: number of the last of these steps; the first of all is 1.
      metrics: the metrics of the loss, NumPy arrays with these steps as their first axis.
      speed: how fast the steps were.
    """

    step: int
    metrics: Any
    speed: Speed


class Trainer:
    """Trains a model by one compiled step that takes and replaces what is trained, and takes what is not.

        trainer = Trainer(model, optax.adamw(1e-4), loss)
        for record in trainer.fit(batch_of, steps=1000):
            print(record.step, record.metrics.mean())

    Args:
      model: the module. Its trained arrays are given up by the first step: take `trainer.model` after it.
      optimizer: the optimizer of optax.
      loss: loss(model, batch) -> (loss, metrics), the loss float32 [] and a pytree of arrays to measure.
      wrt: type of the variables that are trained, such as `nnx.LoRAParam` for adapters alone.
      accumulate: whether the arrays of a batch have a further first axis, of parts that are computed one after the
        other to take less memory: the step's loss, gradient and metrics are then the means over the parts.
      lengths_of: lengths_of(batch) -> integer array, the lengths of the sequences in a batch, by which the speed is
        measured. Without it, a Speed has the time alone.
      batch_sharding: how devices split each array of a batch. The batches are whole then, of NumPy arrays and the same
        in all processes, and each device gets its part. By default batches are taken as they are.
    """

    def __init__(
        self,
        model: nnx.Module,
        optimizer: optax.GradientTransformation,
        loss: Callable[[Any, Batch], tuple[jax.Array, Any]],
        *,
        wrt: type[nnx.Variable[Any]] = nnx.Param,
        accumulate: bool = False,
        lengths_of: Callable[[Batch], np.ndarray] = lambda batch: np.zeros(0, int),
        batch_sharding: jax.sharding.Sharding | None = None,
    ) -> None:
        on_device = jax.tree.map(lambda a: jnp.asarray(a) if isinstance(a, np.ndarray) else a, nnx.state(model))
        nnx.update(model, on_device)
        # bound to their devices, as those of each step are: programs that take the model compile once
        nnx.update(model, jax.tree.map(lambda a: jax.device_put(a, a.sharding), nnx.state(model, wrt)))
        parts: Any = nnx.split(model, wrt, ...)
        graphdef, params, self._frozen = parts
        if not jax.tree.leaves(params):
            raise ValueError(f"model must have a variable of type {wrt.__name__} to train, got none")
        self._model, self._meter, self._lengths_of = model, Meter(model, wrt), lengths_of
        self._batch_sharding = batch_sharding
        state, step = (params, optimizer.init(params)), step_of(graphdef, optimizer, loss, accumulate)
        everywhere = _replicated(params)
        if everywhere is not None:  # the rest of an optimizer's state is split as the parameters are
            put = functools.partial(jax.make_array_from_process_local_data, everywhere)
            state = jax.tree.map(lambda a: a if a.ndim else put(np.asarray(a)), state)
        self._state, splits = state, jax.tree.map(lambda a: a.sharding, state)
        options = compiler_options(num_gathering(model))
        self._step = jax.jit(step, donate_argnums=0, out_shardings=(splits, everywhere), compiler_options=options)

    @property
    def model(self) -> Any:
        """The model, with what it has learned so far."""
        nnx.update(self._model, self._state[0])
        return self._model

    def fit(
        self,
        batch_of: Callable[[int], Batch],
        steps: int,
        *,
        every: Collection[int] = (10,),
        first: bool = False,
        checkpoints: str | os.PathLike[str] | None = None,
        save_every: int = 1000,
    ) -> Iterator[Record]:
        """Trains, and yields a Record now and then; what the caller does with it counts in no speed.

        A run that is stopped and started again goes on from its last state with the same batches, and on a CPU computes
        the bits of one that was not stopped. On a GPU, two runs differ in bits unless XLA_FLAGS has
        --xla_gpu_exclude_nondeterministic_ops=true.

        With `checkpoints`, SIGTERM stops a run: the step that was begun is made and saved, its Record is yielded, and
        once the checkpoint is written, Preempted is raised. For this, a handler takes the place of the one before,
        which is put back at the end, also where the caller stops iterating. There is none in another thread than the
        main one, nor where SIGTERM is ignored.

        If SIGTERM came and the run ends without Preempted, because its last step was made, the caller stopped iterating
        or there was an error, the handler before gets the signal. Where the program has none, SIGTERM ends the process
        then, but not after the last step: what was trained can be written.

        Processes that `jax.distributed.initialize` has connected all stop after the same step if any of them gets
        SIGTERM, for which JAX has a handler from then on. A run that goes on from a checkpoint does not stop if SIGTERM
        came before this call.

        Args:
          batch_of: batch_of(step) -> the batch of a step, from 1, of the same shapes for all, asked for once a step.
            It depends on the step alone, such as `dataset.__getitem__` of a `grain.MapDataset`, or also on what was
            learned before it. How long the first one takes counts in no speed, nor does the step's compilation.
          steps: number of the last step; those before the last checkpoint are not made again.
          every: it yields after the steps whose number one of these divides, and after the last.
          first: whether it yields after the first step too.
          checkpoints: a folder: training goes on from the last checkpoint there, and saves others.
          save_every: steps between two checkpoints; the last step is saved too.

        Raises:
          TrainingError: a loss or a trained variable is not finite, which is looked for before each record and each
            checkpoint; or a checkpoint is damaged, is of another model or cannot be written.
          Preempted: SIGTERM stopped the run before its last step; the same call goes on from there.
        """
        steps, save_every = as_int("steps", steps, 0), as_int("save_every", save_every, 1)
        check_instance("every", every, Collection, "a collection of ints, such as (10,)")
        every = [as_int("every", each, 1) for each in every]
        # the checkpoints are written on leaving, before SIGTERM has its earlier meaning again
        with stop_notices(checkpoints is not None) as is_stopped_after, opened(checkpoints) as manager:
            start, self._state = restored(manager, self._state)
            if start >= steps:
                return
            batch, lengths = self._next(batch_of, start + 1)
            run = self._step.lower(self._state, self._frozen, batch).compile()
            if is_stopped_after(start):
                raise Preempted(start)
            waiting: list[Any] = []
            self._meter.restart()
            for step in range(start + 1, steps + 1):
                if step > start + 1:
                    batch, lengths = self._next(batch_of, step)
                self._state, measured = run(self._state, self._frozen, batch)
                waiting.append(measured)
                self._meter.add(lengths)
                if manager is not None:  # else SIGTERM would have to wait for all steps that are begun
                    jax.block_until_ready(waiting[-2:-1])
                is_stopped = is_stopped_after(step) and step < steps
                is_last = is_stopped or step == steps
                is_told = is_last or (first and step == start + 1) or any(step % each == 0 for each in every)
                is_saved = manager is not None and (is_last or step % save_every == 0)
                if not is_told and not is_saved:
                    continue
                waiting = jax.device_get(waiting)
                _check_finite([loss for loss, _ in waiting], step, manager)
                speed = self._meter.read()
                if is_saved:
                    save(manager, step, self._state)
                if is_told:
                    metrics = jax.tree.map(lambda *arrays: np.stack(arrays), *(metrics for _, metrics in waiting))
                    yield Record(step, metrics, speed)
                    waiting = []
                    self._meter.restart()
                if is_stopped:
                    raise Preempted(step)

    def _next(self, batch_of: Callable[[int], Batch], step: int) -> tuple[Batch, np.ndarray]:
        """The batch of a step, on the devices if a sharding says how, and the lengths of its sequences."""
        batch, sharding = batch_of(step), self._batch_sharding
        lengths = self._lengths_of(batch)
        return batch if sharding is None else on_devices(batch, sharding), lengths


def on_devices(batch: Batch, sharding: jax.sharding.Sharding) -> Batch:
    """The arrays of a batch that each process has whole, split over the devices of all processes."""
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, a.__getitem__), batch)


def step_of(
    graphdef: Any, optimizer: optax.GradientTransformation, loss: Callable[..., Any], accumulate: bool
) -> Callable[..., Any]:
    """The step: ((params, opt_state), frozen, batch) -> (the same after it, (loss, metrics)).

    The loss is NaN where a parameter is not finite after the step.
    """

    @functools.partial(jax.value_and_grad, has_aux=True)
    def gradients_of(params: Any, frozen: Any, part: Batch) -> Any:
        return loss(nnx.merge(graphdef, params, frozen), part)

    def mean_of(params: Any, frozen: Any, parts: Batch) -> Any:
        def add(sums: Any, part: Batch) -> Any:
            measured, gradients = gradients_of(params, frozen, part)
            return jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, gradients), measured

        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32)), params)
        sums, measured = jax.lax.scan(add, zeros, parts)
        count = len(measured[0])
        means = jax.tree.map(lambda p, total: (total / count).astype(p.dtype), params, sums)
        return jax.tree.map(lambda a: jnp.mean(a, axis=0), measured), means

    def step(state: Any, frozen: Any, batch: Batch) -> Any:
        params, opt_state = state
        (value, metrics), gradients = (mean_of if accumulate else gradients_of)(params, frozen, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        is_finite = jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(params)]).all()
        return (params, opt_state), (jnp.where(is_finite, value, jnp.nan), metrics)

    return step


def num_gathering(model: nnx.Module) -> int:
    """The largest number of devices from which layers of the model gather weights; 1 if none does."""
    found = (getattr(module, "sharding", None) for _, module in nnx.iter_modules(model))
    return max((each.size(each.gather_axis) for each in found if isinstance(each, MoESharding)), default=1)


def _replicated(params: Any) -> jax.NamedSharding | None:
    """The sharding of what is on all devices of the parameters; None if they are on one."""
    sharding = jax.tree.leaves(params)[0].sharding
    return jax.NamedSharding(sharding.mesh, jax.P()) if isinstance(sharding, jax.NamedSharding) else None


def _check_finite(losses: list[np.ndarray], last: int, manager: Any) -> None:
    """Raises TrainingError for the first loss that is not finite; `last` is the step of the last loss."""
    for step, loss in enumerate(losses, last - len(losses) + 1):
        if not np.isfinite(loss):
            saved = None if manager is None else manager.latest_step()
            kept = f"; the last checkpoint is of step {saved}" if saved else ""
            what = f"step {step}: the loss or a trained parameter is {loss}"
            raise TrainingError(f"{what}, so nothing more is written{kept}")
