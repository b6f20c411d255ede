"""An expert's first product in FP8 and its activation, in one kernel where that can be."""

import functools
from collections.abc import Callable

from jgg.activations import Activation
from jgg.configs.kernel_configs import KernelConfigForward
from jgg.configs.requirements import why_not_fp8
from jgg.configs.tuned_configs import choose_config
from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import BLOCK
from jgg.launching.choice import How, Launcher
from jgg.primitives.product import Product
from jgg.products import hopper_fp8 as warp_specialized_fp8
from jgg.products.activate import Activate
from jgg.products.activate_fp8 import ACTIVATE_FP8, activated_types
from jgg.products.forward import Forward
from jgg.products.forward_fp8 import FORWARD_FP8, merge_shared_weights, with_quantized_weights
from jgg.products.hopper_fp8 import HiddenFp8
from jgg.products.quantize import QUANTIZE_WEIGHTS


def _one_by_one(call: Callable, operands: Forward, problem: GroupedGemmProblem, **activation):
    """By call(product, operands, **parameters) of each of the two."""
    (pre_activation,) = call(FORWARD_FP8, operands, problem=problem)
    return call(ACTIVATE_FP8, Activate(pre_activation), **activation)


def _result_types(operands: Forward, problem: GroupedGemmProblem, activation: Activation, keeps: bool, **_):
    return [(each.shape, each.dtype) for each in activated_types(problem.y_shape, activation, keeps).values()]


def _plain(operands: Forward, **parameters):
    return _one_by_one(lambda product, operands, **own: product.plain(operands, **own), operands, **parameters)


def _launch(
    launcher: Launcher, operands: Forward, problem: GroupedGemmProblem, activation: Activation, interleaved: bool,
    keeps: bool, power_of_2_scales: bool,
):  # fmt: skip
    config = choose_config(KernelConfigForward, problem, launcher.target, launcher.config)
    if not _is_one_kernel(config, problem, launcher.target, activation, interleaved):
        return _one_by_one(
            lambda product, operands, **own: product.launch(launcher, operands, **own), operands, problem,
            activation=activation, interleaved=interleaved, keeps=keeps, power_of_2_scales=power_of_2_scales,
        )  # fmt: skip
    operands = with_quantized_weights(operands, functools.partial(QUANTIZE_WEIGHTS.launch, launcher))
    hidden = HiddenFp8(activation, keeps, power_of_2_scales)
    launcher = launcher._replace(config=config)
    return list(warp_specialized_fp8.multiply_rows(launcher, problem, *operands, hidden=hidden).values())


def _is_one_kernel(config, problem, target, activation, interleaved):
    """Whether the warp-specialized kernel does both: gate and up of 128 hidden features are two blocks of w's rows.

    It gathers then, however many columns there are: with as few registers as it has without, an activation spills.
    """
    if activation.curve is None or not problem.permute_x or why_not_fp8(problem, target) is not None:
        return False
    if not config.warp_specialized or (activation.is_gated and interleaved):
        return False
    return problem.out_features % (2 * BLOCK if activation.is_gated else BLOCK) == 0


def _several(how: How, operands: Forward, **parameters):
    return _one_by_one(lambda product, operands, **own: product(how, operands, **own), operands, **parameters)


UP_FP8: Product = Product(
    "up_fp8",
    Forward,
    result_types=_result_types,
    plain=_plain,
    launch=_launch,
    several=_several,
    merge_batch=lambda *args, **parameters: merge_shared_weights(UP_FP8, *args, **parameters),
)
"""As ACTIVATE_FP8, of FORWARD_FP8's product."""
