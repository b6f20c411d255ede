"""Exports programs with jgg's kernels: `jax.export` without the safety check that rejects calls of Triton kernels."""

from collections.abc import Callable, Sequence

import jax.export
import jax.stages

_KERNEL_CALL = "triton_kernel_call_ffi"  # as jax-triton calls it; jaxlib has the code behind it


def export(
    fun_jit: jax.stages.Wrapped,
    *,
    platforms: Sequence[str] | None = None,
    disabled_checks: Sequence[jax.export.DisabledSafetyCheck] = (),
) -> Callable[..., jax.export.Exported]:
    """`jax.export.export` for programs that launch Triton kernels, on a machine with a GPU or without.

    The compiled kernels are part of the program: it needs JAX, but neither jgg nor Triton, to be loaded by
    `jax.export.deserialize` and run. Without a GPU, select the target GPU with `jgg.target`:

        with jgg.target(90):
            exported = jgg.export(jax.jit(step), platforms=["cuda"])(params, x)
        path.write_bytes(exported.serialize())

    JAX guarantees months of compatibility for exported programs. For programs with kernels, loading is only guaranteed
    with the same minor version of jaxlib. Kernels are chosen from static sizes. So with `jax.export.symbolic_shape`,
    `implementation=None` means "xla" on every platform. The number of experts must still be a constant.

    Args:
      fun_jit: a jitted function.
      platforms: such as ["cuda"] or ["cpu", "cuda"]; by default the current platform. With both, `implementation=None`
        is exported as "triton" for one and "xla" for the other.
      disabled_checks: more checks to leave out, as in `jax.export.export`.

    Returns: a function of the same arguments, or their `jax.ShapeDtypeStruct`s, that returns a `jax.export.Exported`.
    """
    check = jax.export.DisabledSafetyCheck.custom_call(_KERNEL_CALL)
    return jax.export.export(fun_jit, platforms=platforms, disabled_checks=(*disabled_checks, check))
