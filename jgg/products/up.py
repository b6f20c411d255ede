"""An expert's first product and its activation, in one kernel where the warp-specialized one runs."""

from collections.abc import Callable

import jax

from jgg.activations import Activation
from jgg.configs.kernel_configs import KernelConfigForward
from jgg.configs.tuned_configs import choose_config
from jgg.core.problem import GroupedGemmProblem
from jgg.launching.choice import How, Launcher
from jgg.primitives.product import Product
from jgg.products import forward
from jgg.products import hopper as warp_specialized
from jgg.products.activate import ACTIVATE, Activate
from jgg.products.forward import FORWARD, Forward
from jgg.products.hopper import Hidden
from jgg.products.terms import Terms


def _one_by_one(call: Callable, operands: Forward, problem: GroupedGemmProblem, keeps: bool, **activation):
    """By call(product, operands, **parameters) of each of the two."""
    (pre_activation,) = call(FORWARD, operands, problem=problem)
    (hidden,) = call(ACTIVATE, Activate(pre_activation), **activation)
    return [pre_activation, hidden] if keeps else [hidden]


def _result_types(operands: Forward, problem: GroupedGemmProblem, activation: Activation, keeps: bool, **_):
    num_rows, width = problem.y_shape
    hidden = (num_rows, width // 2) if activation.is_gated else problem.y_shape
    return [(shape, problem.out_dtype) for shape in ([problem.y_shape, hidden] if keeps else [hidden])]


def _plain(operands: Forward, **parameters):
    return _one_by_one(lambda product, operands, **own: product.plain(operands, **own), operands, **parameters)


def _launch(
    launcher: Launcher, operands: Forward, problem: GroupedGemmProblem, activation: Activation, interleaved: bool,
    keeps: bool,
):  # fmt: skip
    config = choose_config(KernelConfigForward, problem, launcher.target, launcher.config)
    launcher = launcher._replace(config=config)
    if not _is_one_kernel(config, problem, activation, interleaved, keeps):
        return _one_by_one(
            lambda product, operands, **own: product.launch(launcher, operands, **own), operands, problem, keeps,
            activation=activation, interleaved=interleaved,
        )  # fmt: skip
    launcher, x, product = forward.choose(launcher, operands, problem)
    results = warp_specialized.multiply_rows(
        launcher, product, Terms(x), operands.w, operands.bounds, operands.gather_indices, bias=operands.bias,
        gathers=product.permute_x, hidden=Hidden(activation, interleaved, keeps),
    )  # fmt: skip
    return [results["y"], results["hidden"]] if keeps else [results["hidden"]]


def _is_one_kernel(config, problem, activation, interleaved, keeps):
    """Whether the warp-specialized kernel does both, without registers of its loading warps that spill."""
    if not config.warp_specialized or activation.curve is None:
        return False
    if activation.is_gated and (problem.out_features % 16 or (problem.w_layout == "ekn" and not interleaved)):
        return False  # rows of hidden end within 16 bytes; or a block of gate and up would lie otherwise than it should
    # error functions beside gathers take too many registers
    return not (activation.curve[0] == "gelu" and problem.permute_x and config.fuse_gather)


def _several(how: How, operands: Forward, **parameters):
    return _one_by_one(lambda product, operands, **own: product(how, operands, **own), operands, **parameters)


def _merge_batch(how: How, operands: Forward, batched: Forward, **parameters):
    axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)
    return jax.vmap(lambda operands: _several(how, operands, **parameters), in_axes=(axes,))(operands)


UP = Product(
    "up",
    Forward,
    result_types=_result_types,
    plain=_plain,
    launch=_launch,
    several=_several,
    merge_batch=_merge_batch,
    config_type=KernelConfigForward,
)
"""[the pre-activation of `problem.y_shape`, if it `keeps` that, hidden [M, I]]; of FORWARD and ACTIVATE.

On several devices and under `vmap` it is those two.
"""
