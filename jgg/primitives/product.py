"""A product: one operation of JAX that both kernels and plain JAX can compute."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
from jax.interpreters import ad, mlir

from jgg.core.gpu_target import known_target
from jgg.core.quantized import NO_DERIVATIVES
from jgg.launching import choice
from jgg.launching.choice import How, Launcher
from jgg.launching.compile_ahead import AheadCompiler, Noted
from jgg.launching.interpret import INTERPRETER_LOCK
from jgg.primitives.partitioning import Letters, define_partitioned


def array_type(shape: Sequence[int], dtype: Any) -> Any:
    """The type of a resulting array, as it stands in a product's `result_types`."""
    return jax.ShapeDtypeStruct(shape, dtype)


class Product[Results]:
    """An operation on a NamedTuple of operands, arrays or None, and on parameters that are hashable.

    Called with how, operands and parameters it returns its results: an array, or a NamedTuple or QuantizedArray of
    arrays, as `result_types` says. It is a primitive, lowered to the implementation asked for or else to the platform's
    own, so that a program traced once can be compiled for several platforms. Under `vmap` it runs once for all elements
    or for one element after the other; under plain `jit` on several devices each device computes its part. JAX
    differentiates it by differentiating `plain`. Functions made of products, such as `grouped_gemm`, have derivative
    rules of their own, which compute gradients by kernels.

    Attributes:
      name: the name that a jaxpr and a profile show.
      operands: the NamedTuple, whose docstring says what they are.
      result_types: (operands, **parameters) -> the results, an `array_type` in place of each array.
      plain: (operands, **parameters) -> results, in plain JAX that can be differentiated.
      launch: (launcher, operands, **parameters) -> results, by kernels.
      letters: (operands, **parameters) -> Letters, which say how it is split over devices, or None if several devices
        compute these operands by `several`; without this function they always do.
      merge_batch: (how, operands, which of them have a leading batch axis, **parameters) -> results with that axis, or
        None where that would copy an operand; without it, `vmap` is a loop.
      config_type: the type of the kernels' configuration, or None for kernels that have none.
      several: (how, operands, **parameters) -> results, computed by products that can be split over several devices.
    """

    ahead = AheadCompiler()  # compiles the kernels of all products of a program side by side

    def __init__(
        self,
        name: str,
        operands: Callable[..., NamedTuple],
        *,
        result_types: Callable[..., Results],
        plain: Callable[..., Results],
        launch: Callable[..., Results],
        letters: Callable[..., Letters | None] | None = None,
        merge_batch: Callable[..., Results | None] | None = None,
        config_type: type | None = None,
        several: Callable[..., Results] | None = None,
    ):
        self.name, self.operands, self.config_type = name, operands, config_type
        self.result_types, self.plain, self.launch = result_types, plain, launch
        self.letters = letters
        on_device, self._bind = define_partitioned(
            name,
            self._note_and_type,
            functools.partial(self._compute, own="xla"),
            self._axes,
            jvp=self._differentiate,
            merge_batch=merge_batch and functools.partial(self._merge_batch, merge_batch),
            several=several and functools.partial(self._by_several, several),
        )
        self._for_cuda = functools.partial(self._compute, own="triton")
        lower = mlir.lower_fun(self._for_cuda, multiple_results=True)
        mlir.register_lowering(on_device, functools.partial(self._lower_beside_others, lower), platform="cuda")

    def __repr__(self):
        return self.name

    def __call__(self, how: How, operands: NamedTuple, **parameters) -> Results:
        """The results, as `result_types` says."""
        leaves, structure = jax.tree.flatten(operands)
        results: Any = jax.tree.structure(self.result_types(operands, **parameters))
        sizes = [size for leaf in leaves for size in leaf.shape]
        if 0 in sizes or any(map(jax.export.is_symbolic_dim, sizes)) or choice.is_plain_jax(how.implementation):
            how = how._replace(implementation="xla")
        arrays = self._bind(*leaves, how=how, structure=structure, parameters=tuple(parameters.items()))
        return results.unflatten(arrays)

    def _note_and_type(self, *leaves, how, **params):
        """The types of the results, for tracing. Notes the operation, which vmap and grad no longer change by then."""
        if how.implementation in (None, "triton") and known_target() is not None:
            is_local = bool(jax.sharding.get_abstract_mesh().manual_axes)
            self.ahead.note(self._noted(is_local, leaves, how=how, **params))
        return self._result_types(*leaves, **params)

    def _result_types(self, *leaves, structure, parameters, **_):
        return jax.tree.leaves(self.result_types(structure.unflatten(leaves), **dict(parameters)))

    def _compute(self, *leaves, own, how, structure, parameters):
        operands, parameters = structure.unflatten(leaves), dict(parameters)
        implementation = how.implementation or own
        if implementation == "triton" and own != "triton":
            raise NotImplementedError(
                "implementation='triton' is for CUDA, and this program is compiled for another platform."
            )
        with jax.named_scope(self._label(leaves[0], **parameters)):
            if implementation == "xla":
                results = self.plain(operands, **parameters)
            else:
                launcher = Launcher.of(how._replace(implementation=implementation))
                results = self.launch(launcher, operands, **parameters)
        return jax.tree.leaves(results)

    def _label(self, operand, problem=None, **_):
        """The name that a profiler shows."""
        sizes = f"{'x'.join(map(str, operand.shape))},{operand.dtype}" if problem is None else problem.label
        return f"jgg.{self.name}[{sizes}]"

    def _axes(self, *leaves, structure, parameters, how):
        operands = structure.unflatten(leaves)
        letters = self.letters and self.letters(operands, **dict(parameters))
        return letters and letters.axes(operands, _of_a_device, by_callback=how.implementation == "interpret")

    def _merge_batch(self, merge_batch, leaves, batched, *, how, structure, parameters):
        results = merge_batch(how, structure.unflatten(leaves), structure.unflatten(batched), **dict(parameters))
        return None if results is None else jax.tree.leaves(results)

    def _by_several(self, several, *leaves, how, structure, parameters):
        return jax.tree.leaves(several(how, structure.unflatten(leaves), **dict(parameters)))

    def _differentiate(self, leaves, tangents, **params):
        """The results, and their tangents, which are computed in plain JAX.

        Raises: NotImplementedError: some tangents would be in FP8, which rounds them to zero.
        """
        varied = [index for index, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
        arrays = [*self._result_types(*leaves, **params), *(leaves[index] for index in varied)]
        if any(array.dtype.itemsize == 1 for array in arrays):
            raise NotImplementedError(NO_DERIVATIVES)

        def plain(*some):
            operands = list(leaves)
            for index, operand in zip(varied, some, strict=True):
                operands[index] = operand
            return jax.tree.leaves(self.plain(params["structure"].unflatten(operands), **dict(params["parameters"])))

        _, tangents_out = jax.jvp(plain, tuple(leaves[i] for i in varied), tuple(tangents[i] for i in varied))
        return self._bind(*leaves, **params), tangents_out

    def _noted(self, is_local, operands, **params):
        own: dict[str, Hashable] = {**params, "product": self}
        return Noted.of(is_local, operands, own)

    def _lower_beside_others(self, lower, context, *args, **params):
        is_local = bool(getattr(context.module_context.axis_context, "manual_axes", ()))
        self.ahead.compile_others(self._noted(is_local, context.avals_in, **params), _lower_noted)
        with INTERPRETER_LOCK.compiles():
            return lower(context, *args, **params)


def _of_a_device(params, devices):
    """The parameters for one device's part of the features and experts."""
    parameters = dict(params["parameters"])
    if "problem" in parameters:
        parameters["problem"] = parameters["problem"].of_a_device(devices)
    return params | {"parameters": tuple(parameters.items())}


def _lower_noted(noted):
    params = dict(noted.params)
    product = params.pop("product")
    operands = [jax.ShapeDtypeStruct(*shape) for shape in noted.shapes]
    with INTERPRETER_LOCK.compiles():
        compute = functools.partial(product._for_cuda, **params)
        jax.jit(compute).trace(*operands).lower(lowering_platforms=("cuda",))
