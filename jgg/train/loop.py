"""`Trainer`: the training loop, for any Flax NNX model, loss, optax optimizer and batches."""

import os
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from jgg.core.arguments import as_int, check, check_instance
from jgg.experts.sharding import MoESharding
from jgg.nnx import Frozen
from jgg.train.checkpoints import FrozenWeights, TrainingError, opened, restored, save
from jgg.train.compiling import compiler_options
from jgg.train.in_backward import OptimizerInBackward
from jgg.train.meter import Meter, Speed
from jgg.train.preemption import Preempted, stop_notices
from jgg.train.state import (
    Path,
    Split,
    State,
    everywhere,
    form_of,
    is_key,
    named,
    named_in,
    own_arrays,
    owned,
    place,
    put,
    set_named,
    split,
)
from jgg.train.steps import Batch, Loss, Optimizer, Step, changed_by, lowered, step_of

_OPTIMIZER = "optimizer."  # before the names of arrays


class Record[Metrics](NamedTuple):
    """What the steps since the previous record measured.

    Attributes:
      step: number of the last of these steps; a run's first step is 1.
      metrics: the metrics of the loss, NumPy arrays with these steps as their first axis.
      speed: how fast the steps were.
    """

    step: int
    metrics: Metrics
    speed: Speed


class Trainer[Model: nnx.Module, Metrics]:
    """Trains a model with one compiled step.

        trainer = Trainer(model, optax.adamw(1e-4), loss)
        for record in trainer.fit(batch_of, steps=1000):
            print(record.step, record.metrics.mean())

    The model holds the state. Each step reads the model's variables and sets those that it changes, so the next step
    uses whatever you set between two steps: merged adapters, `jgg.optim.qk_clip`, a selection bias, `model.eval()`. So
    does the next checkpoint; what you set at a Record is in the checkpoint of the same step. The step is compiled again
    if the model's shapes or options change. The optimizer's own state is kept.

    Variables that the loss changes, such as the counts of `nnx.Dropout` and the means of `nnx.BatchNorm`, are part of
    the state.

    A step reuses the memory of trained arrays. It copies an array first if anything else refers to it, such as an
    `nnx.clone` of the model, which then keeps its values. The copy is made once per reference and needs memory, so
    delete references that you no longer use.

    Args:
      model: the module.
      optimizer: the optax optimizer, or an `OptimizerInBackward`, which takes less memory.
      loss: loss(model, batch) -> (loss, metrics), the loss float32 [] and a pytree of arrays to measure.
      wrt: type of the trained variables, such as `nnx.LoRAParam` to train only adapters.
      accumulate: whether the arrays of a batch have an extra first axis of parts. The parts are computed one after the
        other, which takes less memory, and the step's loss, gradient and metrics are means over the parts. With an
        `OptimizerInBackward` there is one part.
      lengths_of: lengths_of(batch) -> integer array, the lengths of the sequences in a batch, for measuring the
        speed. Without it, a Speed has only the time.
      batch_sharding: how devices split each array of a batch. Batches must then be whole NumPy arrays, the same in all
        processes, and each device gets its part. By default batches are used unchanged.

    Attributes:
      model: the given module, with what it has learned so far. Set it to train another one.

    Raises:
      ValueError: the model has no variable of type `wrt`; or an `OptimizerInBackward` cannot train it.
      TypeError: an `OptimizerInBackward` is given, and the model is not a `jgg.models.Decoder`.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        loss: Loss[Metrics],
        *,
        wrt: type[nnx.Variable[jax.Array]] = nnx.Param,
        accumulate: bool = False,
        lengths_of: Callable[..., np.ndarray] = lambda batch: np.zeros(0, int),
        batch_sharding: jax.sharding.Sharding | None = None,
    ) -> None:
        if isinstance(optimizer, OptimizerInBackward):
            optimizer.check(model)
        self.model = model
        self._optimizer, self._loss, self._wrt, self._accumulate = optimizer, loss, wrt, accumulate
        self._lengths_of, self._batch_sharding = lengths_of, batch_sharding
        state = nnx.state(model)
        params = nnx.filter_state(state, wrt)
        if not jax.tree.leaves(params):
            raise ValueError(f"model must have a variable of type {wrt.__name__} to train, got none")
        place(state)
        own_arrays(params)
        self._everywhere = everywhere(params)
        self._places = place(state, default=self._everywhere)
        nnx.update(model, state)  # for arrays that are no variables
        self._meter = Meter(model, wrt)
        self._trained = _types_of(params)
        self._weights = FrozenWeights(named_in(nnx.filter_state(state, nnx.All((nnx.Param, Frozen), nnx.Not(wrt)))))
        self._opt_state = self._first_opt_state()
        self._form: tuple[object, ...] | None = None  # the form of the model that the step is compiled for
        self._changed: Collection[Path] = ()
        self._done: tuple[object, int] | None = None  # a folder of checkpoints, and the step after which the state is

    def fit(
        self,
        batch_of: Callable[[int], Batch],
        steps: int,
        *,
        every: Collection[int] = (10,),
        first: bool = False,
        checkpoints: str | os.PathLike[str] | None = None,
        save_every: int = 1000,
    ) -> Iterator[Record[Metrics]]:
        """Trains, and yields a Record now and then; time that the caller spends on it does not count in the speed.

        A run that is stopped and restarted resumes from its last state with the same batches. On a CPU its results are
        bit for bit those of a run without the stop. On a GPU, two runs differ in bits unless XLA_FLAGS has
        --xla_gpu_exclude_nondeterministic_ops=true.

        With `checkpoints`, SIGTERM stops a run: the current step is finished, its Record is yielded, its checkpoint is
        written, and then Preempted is raised. To do this, fit replaces the SIGTERM handler, and restores the previous
        one at the end, even if the caller stops iterating. It does not replace it outside the main thread or where
        SIGTERM is ignored.

        If SIGTERM arrives but the run ends without Preempted, because its last step was done, the caller stopped
        iterating or there was an error, the signal goes to the previous handler. If the program has none, SIGTERM then
        ends the process, except after the last step, so that you can still write what was trained.

        If `jax.distributed.initialize` has connected several processes, they all stop after the same step when any of
        them gets SIGTERM, which JAX handles from then on. A run that resumes from a checkpoint does not stop for a
        SIGTERM that came before this call.

        Args:
          batch_of: batch_of(step) -> the batch of a step, counted from 1; called once per step. All batches have the
            same shapes. The batch depends only on the step, as with `dataset.__getitem__` of a `grain.MapDataset`, or
            also on what was learned before it. The speed does not include the time for the first batch, compiling a
            step or saving.
          steps: number of the last step; steps that the last checkpoint covers are not repeated.
          every: yields after each step whose number is divisible by one of these, and after the last step.
          first: whether to yield after the first step too.
          checkpoints: a folder that no other run uses. Training resumes from the last checkpoint there, and saves new
            ones, with all variables of the model and the state of the optimizer. Frozen `nnx.Param` and
            `jgg.nnx.Frozen` variables are only compared by a digest, unless they were set after the Trainer was made. A
            Trainer that made the last checkpoint itself continues from its current model.
          save_every: steps between two checkpoints; the last step is saved too.

        Raises:
          TrainingError: a loss or a trained variable is not finite, which is checked before each record and each
            checkpoint; a checkpoint is damaged, belongs to another model or cannot be written; or another run uses the
            folder.
          ValueError: the shapes or dtypes of trained variables no longer match the optimizer's state; or the loss adds
            a variable to the model, or changes the shape or dtype of one.
          Preempted: SIGTERM stopped the run before its last step; the same call resumes there.
        """
        steps, save_every = as_int("steps", steps, 0), as_int("save_every", save_every, 1)
        check_instance("every", every, Collection, "a collection of ints, such as (10,)")
        every = [as_int("every", each, 1) for each in every]
        # the checkpoints are written on leaving, before SIGTERM has its earlier meaning again
        with stop_notices(checkpoints is not None) as is_stopped_after, opened(checkpoints) as manager:
            start = self._resume(manager)
            if start >= steps:
                if manager is not None and start > (manager.latest_step() or 0):
                    save(manager, start, self._arrays(), self._weights)
                return
            batch, lengths = self._next(batch_of, start + 1)
            self._prepared(batch)
            if is_stopped_after(start):
                raise Preempted(start)
            waiting: list[tuple[jax.Array, Metrics]] = []
            self._meter.restart()
            for step in range(start + 1, steps + 1):
                if step > start + 1:
                    batch, lengths = self._next(batch_of, step)
                waiting.append(self._advance(batch))
                self._done = None if manager is None else (manager.directory, step)
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
                self._check_finite([loss for loss, _ in waiting], step, manager)
                try:
                    if is_told:
                        speed = self._meter.read()
                        metrics = jax.tree.map(lambda *arrays: np.stack(arrays), *(metrics for _, metrics in waiting))
                        yield Record(step, metrics, speed)
                        waiting = []
                finally:  # the checkpoint has what was set at the record, also where no other is asked for
                    if manager is not None and is_saved:
                        with self._meter.paused():
                            save(manager, step, self._arrays(), self._weights)
                if is_told:
                    self._meter.restart()
                if is_stopped:
                    raise Preempted(step)

    def _resume(self, manager: ocp.CheckpointManager | None) -> int:
        """The step to continue from, after the last checkpoint; restores it unless this Trainer wrote it."""
        if manager is None:
            return 0
        latest = manager.latest_step()
        if latest is None:
            return 0
        folder, step = self._done or (None, 0)
        if folder == manager.directory and step >= latest:
            return step
        opt_state = jax.tree.map(_described, self._opt_state)
        del self._opt_state  # or both would need memory
        try:
            found = restored(manager, latest, named_in(nnx.state(self.model)) | named(opt_state, _OPTIMIZER))
        except TrainingError:
            self._opt_state = self._first_opt_state()
            raise
        leaves = [found[name] for name in named(opt_state, _OPTIMIZER)]
        self._opt_state = jax.tree.unflatten(jax.tree.structure(opt_state), leaves)
        set_named(self.model, found)
        self._done = manager.directory, latest
        return latest

    def _arrays(self) -> dict[str, jax.Array]:
        """All that is saved, by names."""
        return named_in(nnx.state(self.model)) | named(self._opt_state, _OPTIMIZER)

    def _first_opt_state(self) -> optax.OptState:
        """The optimizer's state for the current model, placed like the parameters, in arrays of its own."""

        def placed(leaf: jax.Array) -> jax.Array:
            where = self._everywhere
            return leaf if where is None or isinstance(leaf.sharding, jax.NamedSharding) else put(leaf, where)

        leaves, structure = jax.tree.flatten(self._optimizer.init(nnx.state(self.model, self._wrt)))
        return jax.tree.unflatten(structure, [placed(leaf) for leaf in owned(leaves)])

    def _advance(self, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Makes a step; returns the loss and the metrics."""
        state, frozen = self._prepared(batch)
        (state, self._opt_state), measured = self._run((state, self._opt_state), frozen, batch)
        nnx.update(self.model, state)
        return measured

    def _prepared(self, batch: Batch) -> tuple[State, State]:
        """The variables that a step replaces, whose arrays it may reuse, and the variables that it reads."""
        graphdef, state, frozen = self._split()
        form = graphdef, form_of((state, frozen))
        if form != self._form:
            with self._meter.paused():
                self._check_trained(nnx.filter_state(state, self._wrt))
                self._changed = changed_by(self._loss, graphdef, state, frozen, batch, self._accumulate)
                graphdef, state, frozen = self._split()
                self._run = self._compiled(graphdef, state, frozen, batch)
            self._form = graphdef, form_of((state, frozen))
        own_arrays(state)
        return state, frozen

    def _split(self) -> Split[Model]:
        graphdef, state, frozen = split(self.model, self._wrt, self._changed)
        for part in (state, frozen):
            self._places |= place(part, self._places, self._everywhere)
        return graphdef, state, frozen

    def _compiled(self, graphdef: nnx.GraphDef[Model], state: State, frozen: State, batch: Batch) -> Step[Metrics]:
        step = step_of(graphdef, self._optimizer, self._loss, self._accumulate, self._wrt, self._changed)
        in_backward = isinstance(self._optimizer, OptimizerInBackward)
        options = compiler_options(num_gathering(self.model), in_backward=in_backward)
        return lowered(step, (state, self._opt_state), frozen, batch, options, self._everywhere).compile()

    def _check_trained(self, params: State) -> None:
        """Raises ValueError unless the optimizer's state fits the trained variables."""
        found = _types_of(params)
        for name in [*self._trained, *found]:
            was, now = (types.get(name, "none") for types in (self._trained, found))
            check(
                was == now,
                f"model must keep the variables for which the optimizer's state was made, got {name} {now}, was {was}: "
                "make another Trainer.",
            )

    def _check_finite(self, losses: list[jax.Array], last: int, manager: ocp.CheckpointManager | None) -> None:
        """Raises TrainingError for the first loss that is not finite; `last` is the step of the last loss."""
        for step, loss in enumerate(losses, last - len(losses) + 1):
            if not np.isfinite(loss):
                self._done = None
                saved = None if manager is None else manager.latest_step()
                kept = f"; the last checkpoint is of step {saved}" if saved else ""
                what = f"step {step}: the loss or a trained parameter is {loss}"
                raise TrainingError(f"{what}, so nothing more is written{kept}")

    def _next(self, batch_of: Callable[[int], Batch], step: int) -> tuple[Batch, np.ndarray]:
        """The batch of a step, on the devices if there is a sharding, and the lengths of its sequences."""
        batch, sharding = batch_of(step), self._batch_sharding
        lengths = self._lengths_of(batch)
        return batch if sharding is None else on_devices(batch, sharding), lengths


def on_devices[Batch](batch: Batch, sharding: jax.sharding.Sharding) -> Batch:
    """Splits a batch's arrays, which each process has whole, over the devices of all processes."""
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, a.__getitem__), batch)


def _described(array: jax.Array) -> object:
    """The shape, dtype and place of an array."""
    return array if is_key(array) else jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _types_of(params: State) -> dict[str, str]:
    return {name: f"{array.dtype} {list(array.shape)}" for name, array in named_in(params).items()}


def num_gathering(model: nnx.Module) -> int:
    """The largest number of devices that a layer of the model gathers weights from; 1 if none does."""
    found = (getattr(module, "sharding", None) for _, module in nnx.iter_modules(model))
    return max((each.size(each.gather_axis) for each in found if isinstance(each, MoESharding)), default=1)
