"""What memory a training step needs, by parts, from shapes alone: before there are weights or data."""

from typing import Any, NamedTuple, cast

import jax
from flax import nnx

from jgg.core.choices import OF_EXPERTS
from jgg.core.program_memory import planned_memory
from jgg.train.compiling import compiler_options
from jgg.train.in_backward import Backward, OptimizerInBackward
from jgg.train.state import State, split
from jgg.train.steps import Batch, Loss, Optimizer, Own, changed_by, lowered, step_of


class Plan(NamedTuple):
    """Bytes that a training step needs of one device, and of the host.

    Attributes:
      experts: of the experts' matrices.
      others: of all other variables of the model but adapters.
      adapters: of LoRA adapters.
      optimizer: of the optimizer's state.
      kept: of what automatic differentiation keeps on the device for the backward pass, counted by its shapes.
      rest: of all else that XLA allocates: gradients, intermediate results, the batch and what is measured.
      on_host: of what the step keeps in the host's memory.
    """

    experts: int
    others: int
    adapters: int
    optimizer: int
    kept: int
    rest: int
    on_host: int

    @property
    def total(self) -> int:
        """Bytes of the device."""
        return sum(self) - self.on_host

    @property
    def lasting(self) -> int:
        """Bytes of the device that are there between steps too, and that no shorter sequence makes fewer."""
        return self.experts + self.others + self.adapters + self.optimizer


def plan[Metrics](
    model: nnx.Module,
    optimizer: Optimizer,
    loss: Loss[Metrics],
    batch: Batch,
    *,
    wrt: type[nnx.Variable[jax.Array]] = nnx.Param,
) -> Plan:
    """Compiles the step of a `Trainer` with `accumulate=True` for the first device, and says what memory it needs.

    Args:
      model: a module whose variables hold shapes, from `nnx.eval_shape` or `jgg.models.load(..., abstract=True)`.
      optimizer, loss, wrt: as in `Trainer`.
      batch: jax.ShapeDtypeStructs, with an axis of parts before the others.

    Raises:
      RuntimeError: XLA cannot say what memory the step needs.
      ValueError: an `OptimizerInBackward` cannot train the model.
    """
    if isinstance(optimizer, OptimizerInBackward):
        optimizer.check(model)
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def placed[Tree](tree: Tree) -> Tree:
        result: Tree = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), tree)
        return result

    graphdef, state, frozen = split(model, wrt)
    changed = changed_by(loss, graphdef, state, frozen, batch, True)
    graphdef, state, frozen = split(model, wrt, changed)
    opt_state = jax.eval_shape(optimizer.init, nnx.filter_state(state, wrt))
    step = step_of(graphdef, optimizer, loss, True, wrt, changed)
    options = compiler_options(in_backward=isinstance(optimizer, OptimizerInBackward))
    own, frozen, batch = placed(((state, opt_state), frozen, batch))
    memory = planned_memory(lowered(step, own, frozen, batch, options).compile())
    kept = min(_kept(graphdef, own, frozen, optimizer, loss, batch, wrt), memory.temporaries)
    rest = memory.temporaries - kept + memory.results + num_bytes(batch)
    weights = nnx.state(model, nnx.Not(nnx.LoRAParam))
    experts = nnx.filter_state(weights, lambda path, _: "moe" in path and path[-1] in OF_EXPERTS)
    of_experts = num_bytes(experts)
    return Plan(
        experts=of_experts,
        others=num_bytes(weights) - of_experts,
        adapters=num_bytes(nnx.state(model, nnx.LoRAParam)),
        optimizer=num_bytes(opt_state),
        kept=kept,
        rest=rest,
        on_host=memory.on_host,
    )


def num_bytes(tree: object) -> int:
    """Bytes of a tree's arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _kept[Model: nnx.Module, Metrics](
    graphdef: nnx.GraphDef[Model],
    own: Own,
    frozen: State,
    optimizer: Optimizer,
    loss: Loss[Metrics],
    batch: Batch,
    wrt: type[nnx.Variable[jax.Array]],
) -> int:
    """Bytes of the device that the backward pass of one part reads, besides the variables and the optimizer's state."""
    found = 0

    def look(own: Own, frozen: State, part: Batch) -> None:
        nonlocal found
        state, opt_state = cast(tuple[State, Any], own)
        params, rest = nnx.split_state(state, wrt, ...)

        def value_of(params: State) -> tuple[jax.Array, Metrics]:
            return loss(nnx.merge(graphdef, *jax.tree.map(lambda a: a, (params, rest, frozen))), part)

        if isinstance(optimizer, OptimizerInBackward):
            updating = Backward(optimizer, wrt, loss, graphdef, params, (rest, frozen), opt_state, part)
            _, backward, _ = jax.vjp(updating.loss, updating.arguments, has_aux=True)
        else:
            _, backward, _ = jax.vjp(value_of, params, has_aux=True)
        # a variable that passes through a loop or a rule is another tracer, but XLA reads it in place
        given = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((own, frozen))}
        kept = {id(leaf): leaf for leaf in jax.tree.leaves(backward) if (leaf.shape, leaf.dtype) not in given}
        device = jax.memory.Space.Device
        found = num_bytes([leaf for leaf in kept.values() if jax.typeof(leaf).memory_space == device])

    part = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batch)
    jax.eval_shape(look, own, frozen, part)
    return found
