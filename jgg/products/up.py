"""An expert's first product and its activation, in one kernel where the warp-specialized kernel can run."""

import functools
from collections.abc import Callable

import jax

from jgg.activations import Activation
from jgg.configs.kernel_configs import KernelConfigForward
from jgg.configs.requirements import why_not_quantized
from jgg.configs.tuned_configs import choose_config
from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import BLOCK, Format
from jgg.launching.choice import How, Launcher
from jgg.primitives.product import Product, array_type
from jgg.products import forward
from jgg.products.activate import ACTIVATE, Activate, Activated, activated_types
from jgg.products.forward import FORWARD, Forward
from jgg.products.launches import hopper, hopper_quantized
from jgg.products.launches.hopper import Hidden
from jgg.products.launches.pieces import Pieces
from jgg.products.quantize import QUANTIZE_WEIGHTS, with_quantized


def _one_by_one(
    call: Callable,
    operands: Forward,
    problem: GroupedGemmProblem,
    keeps: bool,
    stored_as: Format | None = None,
    **activation,
) -> Activated:
    """Computes FORWARD and then ACTIVATE, each by `call(product, operands, **parameters)`."""
    pre_activation = call(FORWARD, operands, problem=problem)
    if stored_as is not None:
        return call(ACTIVATE, Activate(pre_activation), stored_as=stored_as, keeps=keeps, **activation)
    results = call(ACTIVATE, Activate(pre_activation), **activation)
    return results._replace(kept=pre_activation) if keeps else results


def _result_types(
    operands: Forward,
    problem: GroupedGemmProblem,
    activation: Activation,
    keeps: bool,
    stored_as: Format | None = None,
    **_,
) -> Activated:
    pre_activation = array_type(problem.y_shape, problem.out_dtype)
    results = activated_types(pre_activation, activation, stored_as, keeps)
    return results._replace(kept=pre_activation) if keeps and stored_as is None else results


def _plain(operands: Forward, **parameters):
    return _one_by_one(lambda product, operands, **own: product.plain(operands, **own), operands, **parameters)


def _launch(
    launcher: Launcher,
    operands: Forward,
    problem: GroupedGemmProblem,
    activation: Activation,
    interleaved: bool,
    keeps: bool,
    stored_as: Format | None = None,
):
    launcher, operands = forward.with_readable_weights(launcher, operands, problem)
    config = choose_config(KernelConfigForward, problem, launcher.target, launcher.config)
    hidden = Hidden(activation, interleaved, keeps, stored_as)
    if not _is_one_kernel(config, problem, launcher.target, hidden):
        return _one_by_one(
            lambda product, operands, **own: product.launch(launcher, operands, **own),
            operands,
            problem,
            keeps,
            stored_as,
            activation=activation,
            interleaved=interleaved,
        )
    launcher = launcher._replace(config=config)
    if problem.is_quantized:
        quantize_weights = functools.partial(QUANTIZE_WEIGHTS.launch, launcher)
        operands = operands._replace(w=with_quantized(operands.w, quantize_weights))
        return hopper_quantized.multiply_and_activate(launcher, problem, *operands, hidden=hidden)
    launcher, x, product = forward.choose(launcher, operands, problem)
    results = hopper.multiply_rows(
        launcher,
        product,
        Pieces(x),
        operands.w,
        operands.bounds,
        operands.gather_indices,
        bias=operands.bias,
        gathers=product.permute_x,
        hidden=hidden,
        low_rank=operands.low_rank,
    )
    return Activated(results["hidden"], results.get("y"))


def _is_one_kernel(config, problem, target, hidden: Hidden):
    """Whether the warp-specialized kernel can do both steps, and without spilling registers of its loading warps."""
    if config.kernel != "hopper" or hidden.activation.curve is None:
        return False
    if problem.is_quantized != (hidden.stored_as is not None):
        return False  # the kernels quantize results if and only if the operands are quantized
    if problem.is_quantized:
        return _is_one_quantizing_kernel(problem, target, hidden)
    if hidden.activation.is_gated and problem.out_features % 16:
        return False  # rows of hidden are no multiple of 16 bytes
    # gelu's error function and gathers in one kernel take too many registers
    return not (hidden.activation.curve[0] == "gelu" and problem.permute_x and config.fuse_gather)


def _is_one_quantizing_kernel(problem, target, hidden: Hidden):
    """Whether the warp-specialized kernel for quantized operands can do both steps.

    Gate and up of 128 hidden features must be two whole blocks of w's rows. And the kernel must gather x, however many
    columns there are: without gathers it has so few registers that an activation spills.
    """
    is_gated = hidden.activation.is_gated
    if not problem.permute_x or (is_gated and hidden.interleaved) or why_not_quantized(problem, target) is not None:
        return False
    return problem.out_features % (2 * BLOCK if is_gated else BLOCK) == 0


def _several(how: How, operands: Forward, **parameters):
    return _one_by_one(lambda product, operands, **own: product(how, operands, **own), operands, **parameters)


def _merge_batch(how: How, operands: Forward, batched: Forward, problem: GroupedGemmProblem, **parameters):
    if problem.is_quantized:
        return forward.merge_shared_weights(UP, how, operands, batched, problem=problem, **parameters)
    axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)
    return jax.vmap(lambda operands: _several(how, operands, problem=problem, **parameters), in_axes=(axes,))(operands)


UP: Product[Activated] = Product(
    "up",
    Forward,
    result_types=_result_types,
    plain=_plain,
    launch=_launch,
    several=_several,
    merge_batch=_merge_batch,
    config_type=KernelConfigForward,
)
"""The results of FORWARD followed by ACTIVATE: Activated, with `kept` if it `keeps` the pre-activation.

On several devices it is those two products, and under `vmap` too unless operands are quantized.
"""
