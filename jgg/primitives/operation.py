"""An operation of JAX that both kernels and plain JAX can compute."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.export
from jax.interpreters import ad, mlir
from jax.typing import DTypeLike

from jgg.core.arguments import Shaped
from jgg.core.gpu_target import known_target
from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import NO_DERIVATIVES, is_quantized
from jgg.launching import choice
from jgg.launching.choice import How, Launcher
from jgg.launching.compile_ahead import AheadCompiler, Noted
from jgg.launching.interpret import INTERPRETER_LOCK
from jgg.primitives import vmap as batching
from jgg.primitives.barrier import Tangent
from jgg.primitives.partitioning import WHOLE, Axes, Letters, Params, define_partitioned


def array_type(shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
    """The type of a resulting array, as it stands in an operation's `result_types`."""
    return cast(jax.Array, jax.ShapeDtypeStruct(shape, dtype))


class Call(NamedTuple):
    """One call of an operation, without its arrays; hashable, the parameter of its primitive.

    Attributes:
      structure: the tree of the operands.
      parameters: the operation's parameters.
      config: the configuration of the kernels that the caller asks for, or None.
    """

    structure: Any
    parameters: tuple[tuple[str, Hashable], ...]
    how: How
    config: Hashable

    @property
    def of_kernels(self) -> dict[str, Hashable]:
        """The parameters of a function that chooses kernels."""
        return dict(self.parameters) | ({} if self.config is None else {"config": self.config})


class Operation[Results]:
    """An operation on a NamedTuple of operands, arrays or None, and on parameters that are hashable.

    Call it with how, operands and parameters. It returns an array, or a NamedTuple or QuantizedArray of arrays, as
    `result_types` says. It is a JAX primitive. It lowers to the implementation you ask for, or else to the platform's
    default, so a program traced once can be compiled for several platforms. Under `vmap` it runs once for all elements
    or once per element; under plain `jit` on several devices each device computes its part. JAX differentiates it by
    differentiating `plain`. Functions built from operations, such as `grouped_gemm`, have their own derivative rules,
    which compute gradients with kernels.

    Attributes:
      name: the name that a jaxpr and a profile show.
      operands: the NamedTuple, whose docstring says what they are.
      result_types: (operands, **parameters) -> the results, an `array_type` in place of each array.
      plain: (operands, **parameters) -> results, in plain JAX that can be differentiated.
      launch: (launcher, operands, **parameters) -> results, by kernels. If callers may ask for a configuration of the
        kernels, `launch` and a function `vmap` also take a parameter `config`, passed only when one is asked for.
      vmap: how `vmap` computes it. "loop": element by element; "rows": as one operation on all rows, which do not
        depend on each other; "groups": as one operation with more groups; "axis": with the batch axis as one more
        leading axis; "several": by the operations of `several`. Or a function (how, operands, which of them have a
        leading batch axis, **parameters) -> results with that axis. It loops if one operation would copy an operand,
        or if such a function returns None.
      mesh: how devices split it. "rows": by rows, which do not depend on each other; "several": by `several`. Or a
        function (operands, **parameters) -> Letters, or None for `several`.
      shared: the names of operands that all rows share, such as a norm's scale.
      several: (how, operands, **parameters) -> results, by operations that several devices can split; by default
        `plain`, which XLA splits.
    """

    ahead = AheadCompiler()  # compiles the kernels of all operations of a program side by side

    def __init__(
        self,
        name: str,
        operands: Callable[..., NamedTuple],
        *,
        result_types: Callable[..., Results],
        plain: Callable[..., Results],
        launch: Callable[..., Results],
        vmap: Literal["loop", "rows", "groups", "axis", "several"] | Callable[..., Results | None] = "loop",
        mesh: Literal["rows", "several"] | Callable[..., Letters | None] = "several",
        shared: tuple[str, ...] = (),
        several: Callable[..., Results] | None = None,
    ) -> None:
        self.name, self.operands, self.shared = name, operands, shared
        self.result_types, self.plain, self.launch = result_types, plain, launch
        self.mesh = self._letters_of_rows if mesh == "rows" else mesh
        self.several: Callable[..., Results] = several or (
            lambda how, operands, **parameters: plain(operands, **parameters)
        )
        rule = None if callable(vmap) else batching.RULES.get(vmap)
        merge_batch = vmap if rule is None else functools.partial(rule, self)
        on_device, self._bind = define_partitioned(
            name,
            self._note_and_type,
            functools.partial(self._compute, own="xla"),
            self._axes,
            jvp=self._differentiate,
            merge_batch=functools.partial(self._merge_batch, merge_batch) if callable(merge_batch) else None,
            several=self._by_several,
        )
        self._for_cuda = functools.partial(self._compute, own="triton")
        lower = mlir.lower_fun(self._for_cuda, multiple_results=True)
        mlir.register_lowering(on_device, functools.partial(self._lower_beside_others, lower), platform="cuda")

    def __repr__(self) -> str:
        return self.name

    def __call__(
        self, how: How | None, operands: NamedTuple, config: Hashable = None, **parameters: Hashable
    ) -> Results:
        """The results, as `result_types` says.

        Args:
          how: None for `plain` instead of the primitive; JAX differentiates `plain` to any order.
          config: what kernels are asked to use, None to choose.
        """
        if how is None:
            return self.plain(operands, **parameters)
        leaves, structure = jax.tree.flatten(operands)
        results: Any = jax.tree.structure(self.result_types(operands, **parameters))
        sizes = [size for leaf in leaves for size in leaf.shape]
        if 0 in sizes or any(map(jax.export.is_symbolic_dim, sizes)) or choice.is_plain_jax(how.implementation):
            how = how._replace(implementation="xla")
        call = Call(structure, tuple(parameters.items()), how, config)
        return results.unflatten(self._bind(*leaves, call=call))

    def _note_and_type(self, *leaves: jax.Array, call: Call) -> list[jax.Array]:
        """The types of the results, for tracing. Notes the operation, which vmap and grad no longer change by then."""
        if call.how.implementation in (None, "triton") and known_target() is not None:
            is_local = bool(jax.sharding.get_abstract_mesh().manual_axes)
            self.ahead.note(self._noted(is_local, leaves, call))
        return self._result_types(leaves, call)

    def _result_types(self, leaves: Sequence[jax.Array], call: Call) -> list[jax.Array]:
        return jax.tree.leaves(self.result_types(call.structure.unflatten(leaves), **dict(call.parameters)))

    def _compute(self, *leaves: jax.Array, own: str, call: Call) -> list[jax.Array]:
        operands, parameters = call.structure.unflatten(leaves), dict(call.parameters)
        implementation = call.how.implementation or own
        if implementation == "triton" and own != "triton":
            raise NotImplementedError(
                "implementation='triton' is for CUDA, and this program is compiled for another platform."
            )
        with jax.named_scope(self._label(leaves[0], **parameters)):
            if implementation == "xla":
                results = self.plain(operands, **parameters)
            else:
                launcher = Launcher.of(call.how._replace(implementation=implementation))
                results = self.launch(launcher, operands, **call.of_kernels)
        return jax.tree.leaves(results)

    def _label(self, operand: jax.Array, problem: Hashable = None, **_: Hashable) -> str:
        """The name that a profiler shows."""
        if isinstance(problem, GroupedGemmProblem):
            return f"jgg.{self.name}[{problem.label}]"
        return f"jgg.{self.name}[{'x'.join(map(str, operand.shape))},{operand.dtype}]"

    def _axes(self, *leaves: jax.Array, call: Call) -> Axes | None:
        operands = call.structure.unflatten(leaves)
        letters = self.mesh(operands, **dict(call.parameters)) if callable(self.mesh) else None
        return letters and letters.axes(operands, _of_a_device, by_callback=call.how.implementation == "interpret")

    def _merge_batch(
        self,
        merge_batch: Callable[..., Results | None],
        leaves: Sequence[jax.Array],
        batched: Sequence[bool],
        *,
        call: Call,
    ) -> list[jax.Array] | None:
        if any(leaf.size == 0 for leaf in leaves):  # the problems' own parts could not be told apart
            return None
        operands = (call.structure.unflatten(each) for each in (leaves, batched))
        results = merge_batch(call.how, *operands, **call.of_kernels)
        return None if results is None else jax.tree.leaves(results)

    def _letters_of_rows(self, operands: NamedTuple, **parameters: Hashable) -> Letters | None:
        results = jax.tree.leaves(self.result_types(operands, **parameters), is_leaf=is_quantized)
        if any(map(is_quantized, results)):
            return None
        arrays = {name: array for name, array in operands._asdict().items() if array is not None}
        letters = {
            name: (WHOLE if name in self.shared else "t") + WHOLE * (array.ndim - 1) for name, array in arrays.items()
        }
        of_results = tuple("t" + WHOLE * (len(array.shape) - 1) for array in results)
        return Letters(letters, of_results, ("",) * len(results))

    def _by_several(self, *leaves: jax.Array, call: Call) -> list[jax.Array]:
        return jax.tree.leaves(self.several(call.how, call.structure.unflatten(leaves), **dict(call.parameters)))

    def _differentiate(
        self, leaves: Sequence[jax.Array], tangents: Sequence[Tangent], *, call: Call
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The results, and their tangents, which are computed in plain JAX.

        Raises: NotImplementedError: some tangents would be in FP8, which rounds them to zero.
        """
        varied = [index for index, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
        arrays = [*self._result_types(leaves, call), *(leaves[index] for index in varied)]
        if any(array.dtype.itemsize == 1 for array in arrays):
            raise NotImplementedError(NO_DERIVATIVES)

        def plain(*some: jax.Array) -> list[jax.Array]:
            operands = list(leaves)
            for index, operand in zip(varied, some, strict=True):
                operands[index] = operand
            return jax.tree.leaves(self.plain(call.structure.unflatten(operands), **dict(call.parameters)))

        _, tangents_out = jax.jvp(plain, tuple(leaves[i] for i in varied), tuple(tangents[i] for i in varied))
        return self._bind(*leaves, call=call), tangents_out

    def _noted(self, is_local: bool, operands: Sequence[Shaped], call: Call) -> Noted:
        return Noted.of(is_local, operands, {"operation": self, "call": call})

    def _lower_beside_others(
        self, lower: Callable[..., object], context: mlir.LoweringRuleContext, *args: object, call: Call
    ) -> Any:
        is_local = bool(getattr(context.module_context.axis_context, "manual_axes", ()))
        self.ahead.compile_others(self._noted(is_local, cast(Sequence[Shaped], context.avals_in), call), _lower_noted)
        with INTERPRETER_LOCK.compiles():
            return lower(context, *args, call=call)


def _of_a_device(params: Params, devices: dict[str, int]) -> Params:
    """The parameters for one device's part of the features and experts."""
    call = cast(Call, params["call"])
    parameters = dict(call.parameters)
    if "problem" in parameters:
        parameters["problem"] = cast(GroupedGemmProblem, parameters["problem"]).of_a_device(devices)
    return {"call": call._replace(parameters=tuple(parameters.items()))}


def _lower_noted(noted: Noted) -> None:
    params = dict(noted.params)
    operation = cast(Operation[object], params.pop("operation"))
    operands = [jax.ShapeDtypeStruct(*shape) for shape in noted.shapes]
    with INTERPRETER_LOCK.compiles():
        compute = functools.partial(operation._for_cuda, **params)
        jax.jit(compute).trace(*operands).lower(lowering_platforms=("cuda",))
