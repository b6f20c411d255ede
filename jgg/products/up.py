"""An expert's first product and its activation, in one kernel where the warp-specialized kernel can run."""

import functools
from collections.abc import Callable, Hashable

import jax

from jgg.core.problem import GroupedGemmProblem
from jgg.launching.choice import How, Launcher
from jgg.launching.kernel_configs import KernelConfigForward
from jgg.primitives import vmap
from jgg.primitives.operation import Operation, array_type
from jgg.products import forward
from jgg.products.activate import ACTIVATE
from jgg.products.forward import FORWARD, Forward
from jgg.products.launches import hopper, hopper_quantized
from jgg.products.launches.activations import Activate, Activated, Hidden, activated_types
from jgg.products.launches.plans import plan_up


def _activated(activate: Callable[..., Activated], pre_activation: jax.Array, hidden: Hidden) -> Activated:
    """The results of UP, of the first product's; `activate` computes ACTIVATE."""
    if hidden.stored_as is not None:
        return activate(Activate(pre_activation), hidden=hidden)
    results = activate(Activate(pre_activation), hidden=hidden._replace(keeps=False))
    return results._replace(kept=pre_activation) if hidden.keeps else results


def _result_types(operands: Forward, problem: GroupedGemmProblem, hidden: Hidden) -> Activated:
    pre_activation = array_type(problem.y_shape, problem.out_dtype)
    results = activated_types(pre_activation, hidden)
    return results._replace(kept=pre_activation) if hidden.keeps and hidden.stored_as is None else results


def _plain(operands: Forward, problem: GroupedGemmProblem, hidden: Hidden) -> Activated:
    return _activated(ACTIVATE.plain, FORWARD.plain(operands, problem=problem), hidden)


def _launch(
    launcher: Launcher,
    operands: Forward,
    problem: GroupedGemmProblem,
    hidden: Hidden,
    config: KernelConfigForward | None = None,
) -> Activated:
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
    hidden: Hidden,
    config: KernelConfigForward | None = None,
) -> Activated:
    pre_activation = FORWARD(how, operands, config=config, problem=problem)
    return _activated(functools.partial(ACTIVATE, how), pre_activation, hidden)


def _merge_batch(
    how: How, operands: Forward, batched: Forward, problem: GroupedGemmProblem, **parameters: Hashable
) -> Activated | None:
    if problem.is_quantized:
        compute = lambda operands: UP(how, operands, problem=problem, **parameters)  # noqa: E731
        return forward.merge_shared_weights(compute, how, operands, batched)
    return vmap.by_parts(UP, how, operands, batched, problem=problem, **parameters)


UP: Operation[Activated] = Operation(
    "up",
    Forward,
    result_types=_result_types,
    plain=_plain,
    launch=_launch,
    vmap=_merge_batch,
    several=_several,
)
"""The results of FORWARD followed by ACTIVATE: Activated, with `kept` if it `keeps` the pre-activation.

On several devices it is those two products, and under `vmap` too unless operands are quantized.
"""
