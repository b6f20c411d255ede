"""An expert's first product and its activation, in one kernel where the warp-specialized kernel can run."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jgg.core.problem import GroupedGemmProblem
from jgg.launching.choice import How, Launcher
from jgg.launching.kernel_configs import KernelConfigForward
from jgg.primitives.operation import Operation, array_type
from jgg.products import forward
from jgg.products.activate import ACTIVATE
from jgg.products.forward import FORWARD, Forward
from jgg.products.launches import hopper, hopper_quantized
from jgg.products.launches.activations import Activate, Activated, Hidden, activated_types
from jgg.products.launches.plans import plan_up


def _activated(activate: Callable[..., Activated], pre_activation: jax.Array, hidden: Hidden) -> Activated:
    """The results of UP, of the first product's; `activate` computes ACTIVATE."""
    operands = Activate(pre_activation)
    if hidden.stored_as is not None:
        return activate(operands, **hidden._asdict())
    results = activate(operands, activation=hidden.activation, interleaved=hidden.interleaved)
    return results._replace(kept=pre_activation) if hidden.keeps else results


def _result_types(operands: Forward, problem: GroupedGemmProblem, **parameters: Any) -> Activated:
    hidden, pre_activation = Hidden(**parameters), array_type(problem.y_shape, problem.out_dtype)
    results = activated_types(pre_activation, hidden)
    return results._replace(kept=pre_activation) if hidden.keeps and hidden.stored_as is None else results


def _plain(operands: Forward, problem: GroupedGemmProblem, **parameters: Any) -> Activated:
    return _activated(ACTIVATE.plain, FORWARD.plain(operands, problem=problem), Hidden(**parameters))


def _launch(
    launcher: Launcher,
    operands: Forward,
    problem: GroupedGemmProblem,
    config: KernelConfigForward | None = None,
    **parameters: Any,
) -> Activated:
    hidden = Hidden(**parameters)
    plan = plan_up(problem, launcher.target, hidden, config, **forward.plan_of_w(operands, problem))
    if plan is None:
        pre_activation = FORWARD.launch(launcher, operands, problem=problem, config=config)
        return _activated(functools.partial(ACTIVATE.launch, launcher), pre_activation, hidden)
    multiply = hopper_quantized if plan.problem.is_quantized else hopper
    return multiply.multiply_and_activate(launcher, forward.prepared(launcher, plan, operands), hidden)


def _several(
    how: How,
    operands: Forward,
    problem: GroupedGemmProblem,
    config: KernelConfigForward | None = None,
    **parameters: Any,
) -> Activated:
    pre_activation = FORWARD(how, operands, config=config, problem=problem)
    return _activated(functools.partial(ACTIVATE, how), pre_activation, Hidden(**parameters))


def _merge_batch(
    how: How, operands: Forward, batched: Forward, problem: GroupedGemmProblem, **parameters: Any
) -> Activated | None:
    if problem.is_quantized:
        compute = functools.partial(UP, how, problem=problem, **parameters)
        return forward.merge_shared_weights(compute, how, operands, batched)
    axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)
    return jax.vmap(lambda operands: _several(how, operands, problem, **parameters), in_axes=(axes,))(operands)


UP: Operation[Activated] = Operation(
    "up",
    Forward,
    result_types=_result_types,
    plain=_plain,
    launch=_launch,
    several=_several,
    merge_batch=_merge_batch,
)
"""The results of FORWARD followed by ACTIVATE: Activated, with `kept` if it `keeps` the pre-activation.

On several devices it is those two products, and under `vmap` too unless operands are quantized.
"""
