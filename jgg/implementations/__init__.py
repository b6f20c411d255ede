"""The ways to compute a grouped GEMM, and the choice between them.

"triton" launches the kernels on a CUDA GPU, "xla" is plain differentiable JAX for any platform, "interpret" runs the
kernels on the CPU. None stages both of the first two and leaves the choice to the platform that is compiled for.
"""

import dataclasses
import functools
import importlib
import importlib.util

import jax
import jax.numpy as jnp
from jax.interpreters import ad, mlir

from jgg.implementations import ahead
from jgg.implementations.batching import merge_batch
from jgg.implementations.language import LANGUAGE
from jgg.implementations.partitioning import define_partitioned
from jgg.implementations.product_axes import axes_of_product
from jgg.problem import GroupedGemmProblem
from jgg.target import MIN_COMPUTE_CAPABILITY, Target, current_target, device_target, known_target

NAMES = ("triton", "xla", "interpret")
PRODUCTS = ("forward", "backward_dx", "backward_dw")  # those that have a configuration


def check_implementation(implementation: str | None):
    """Raises ValueError for a name that is none of NAMES or a GPU too old, ImportError for packages not installed."""
    if implementation is not None and implementation not in NAMES:
        raise ValueError(f"implementation must be one of {NAMES} or None, got {implementation!r}.")
    if implementation in ("triton", "interpret") and not has_triton():
        raise ImportError(
            f"implementation={implementation!r} needs Triton and jax-triton: pip install 'jgg[cuda12]' (Linux only)."
        )
    if implementation == "triton" and _is_too_old(device_target()):
        raise ValueError(
            f"implementation must be 'xla' on {device_target().name}, whose compute capability is below "
            f"{MIN_COMPUTE_CAPABILITY / 10}, got 'triton'."
        )


def is_plain_jax(implementation: str | None) -> bool:
    """Whether a choice can only lead to the xla implementation, so that it needs no custom derivative."""
    if implementation is not None:
        return implementation == "xla"
    return not has_triton() or _is_too_old(device_target())


def _is_too_old(device: Target | None) -> bool:
    return device is not None and device.compute_capability < MIN_COMPUTE_CAPABILITY


@functools.cache
def has_triton() -> bool:
    """Whether Triton and jax-triton are installed."""
    return all(importlib.util.find_spec(package) is not None for package in ("triton", "jax_triton"))


@dataclasses.dataclass(frozen=True)
class Operation:
    """A grouped GEMM and how to compute it, as the static argument of a custom_vjp.

    Attributes:
      implementation: one of NAMES or None; "xla" for a problem of symbolic shapes.
      target: the GPU that "triton" is for.
      configs: of PRODUCTS; None for one to be chosen.
    """

    problem: GroupedGemmProblem
    implementation: str | None
    target: Target
    configs: tuple = (None, None, None)

    def __post_init__(self):
        if not self.problem.is_symbolic:
            return
        if self.implementation not in (None, "xla"):
            raise ValueError(
                "implementation must be None or 'xla' for symbolic shapes, since kernels are chosen by sizes, "
                f"got {self.implementation!r}."
            )
        object.__setattr__(self, "implementation", "xla")

    def run(self, product: str, *arrays, **options):
        """The results of one product of arrays, some None.

        `implementations.kernels` has the arguments of "forward" and "backward_dx", `weight_gradient`, `combining` and
        `layer_kernels` beside it those of "backward_dw", of "combine", and of "activate" and "activate_backward". It is
        a primitive, lowered to the implementation asked for or else to the platform's own, so that a program traced
        once can be compiled for several platforms.
        """
        config = dict(zip(PRODUCTS, self.configs, strict=True)).get(product)
        return _run(product, self.implementation, self.target, self.problem, config, *arrays, **options)


def run_routing(product: str, implementation: str | None, *arrays, **options):
    """The same for "top_k" and "sort" of `implementations.layer_kernels`, which are of no grouped GEMM."""
    return _run(product, implementation, current_target(), None, None, *arrays, **options)


def _run(product, implementation, target, problem, config, *arrays, **options):
    leaves, structure = jax.tree.flatten(arrays)
    is_empty = any(leaf.size == 0 for leaf in leaves)
    is_symbolic = any(jax.export.is_symbolic_dim(size) for leaf in leaves for size in leaf.shape)
    return _bind(
        *leaves,
        product=product,
        implementation="xla" if is_empty or is_symbolic or is_plain_jax(implementation) else implementation,
        target=target,
        problem=problem,
        config=config,
        structure=structure,
        options=tuple(options.items()),
    )


def _note_and_type(*leaves, **params):
    """The types that tracing asks for; by then vmap and grad have made of the operation what will be lowered."""
    if params["implementation"] in (None, "triton") and known_target() is not None:
        is_local = bool(jax.sharding.get_abstract_mesh().manual_axes)
        ahead.note(ahead.Noted.of(is_local, leaves, params))
    return _result_types(*leaves, **params)


def _result_types(*leaves, product, problem, structure, options, **_):
    arrays, options = structure.unflatten(leaves), dict(options)
    if product == "top_k":
        return [((arrays[0].shape[0], options["topk"]), jnp.int32)]
    if product == "sort":
        return [((options["num_experts"],), jnp.int32), (arrays[0].shape, jnp.int32)]
    if product == "activate":
        rows, width = arrays[0].shape
        return [((rows, width // 2 if options["activation"].is_gated else width), arrays[0].dtype)]
    if product == "activate_backward":
        pre_activation, z, _ = arrays
        dtype = pre_activation.dtype
        return [(pre_activation.shape, dtype), (z.shape, dtype), (z.shape[:1], jnp.float32)]
    if product == "forward":
        return [(problem.y_shape, problem.out_dtype)]
    if product == "backward_dx":
        row_sums = [((problem.num_rows,), jnp.float32)]
        return [(problem.x_shape, problem.dtype)] + (row_sums if arrays[2] is not None else [])
    if product == "combine":
        rows, positions, _ = arrays
        return [((positions.shape[0] // options["topk"], rows.shape[1]), rows.dtype)]
    dbias = [((problem.num_experts, problem.out_features), jnp.float32)]
    return [(problem.w_shape, problem.dtype)] + (dbias if options["with_bias"] else [])


def _compute(*leaves, own, product, implementation, target, problem, config, structure, options):
    name = implementation or own
    if name == "triton" and own != "triton":
        raise NotImplementedError(
            "implementation='triton' is for CUDA, and this program is compiled for another platform."
        )
    module = importlib.import_module(f"jgg.implementations.{name}")
    with jax.named_scope(_label(product, problem, leaves[0])):
        return getattr(module, product)(target, problem, config, *structure.unflatten(leaves), **dict(options))


def _label(product, problem, operand):
    """What a profiler shows a product as."""
    if product not in PRODUCTS:
        return f"jgg.{product}[{'x'.join(map(str, operand.shape))},{operand.dtype}]"
    return (
        f"jgg.{product}[M={problem.num_rows},K={problem.in_features},N={problem.out_features},"
        f"E={problem.num_experts},{problem.dtype}]"
    )


def _merge_batch(leaves, batched, *, product, implementation, target, problem, config, structure, options):
    def run(other, problem, *arrays, **options):
        return _run(other, implementation, target, problem, config if other == product else None, *arrays, **options)

    arrays, batched = structure.unflatten(leaves), structure.unflatten(batched)
    return merge_batch(run, product, problem, arrays, batched, dict(options))


def _differentiate(leaves, tangents, **params):
    """The results and their tangents, which are computed in plain JAX: derivatives of a derivative."""
    varied = [index for index, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def plain(*some):
        operands = list(leaves)
        for index, operand in zip(varied, some, strict=True):
            operands[index] = operand
        return _compute(*operands, own="xla", **params | {"implementation": "xla"})

    _, tangents_out = jax.jvp(plain, tuple(leaves[i] for i in varied), tuple(tangents[i] for i in varied))
    return _bind(*leaves, **params), tangents_out


_products, _bind = define_partitioned(
    "grouped_gemm",
    _note_and_type,
    functools.partial(_compute, own="xla"),
    axes_of_product,
    _merge_batch,
)
_lower_for_cuda = mlir.lower_fun(functools.partial(_compute, own="triton"), multiple_results=True)


def _lower_beside_others(context, *args, **params):
    is_local = bool(getattr(context.module_context.axis_context, "manual_axes", ()))
    ahead.compile_others(ahead.Noted.of(is_local, context.avals_in, params), _lower_noted)
    with LANGUAGE.compiles():
        return _lower_for_cuda(context, *args, **params)


def _lower_noted(operation):
    compute = functools.partial(_compute, own="triton", **dict(operation.params))
    operands = [jax.ShapeDtypeStruct(*shape) for shape in operation.shapes]
    with LANGUAGE.compiles():
        jax.jit(compute).trace(*operands).lower(lowering_platforms=("cuda",))


_product_on_device, _ = _products
mlir.register_lowering(_product_on_device, _lower_beside_others, platform="cuda")
for _primitive in _products:
    ad.primitive_jvps[_primitive] = _differentiate
