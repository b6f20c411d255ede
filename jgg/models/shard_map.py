"""Parts of a sharded model that each device computes for its own sequences in a `jax.shard_map`, as kernels need.

Experts are not among them: `jgg.nnx.MoE` has its own `jax.shard_map`, which exchanges their tokens.
"""

from collections.abc import Callable

import jax
from flax import nnx

from jgg.experts.sharding import MoESharding

P = jax.P


def map_sequences[Result](
    function: Callable[..., Result], sharding: MoESharding | None, whole: object, *arrays: object
) -> Result:
    """Computes `function(whole, *arrays)`; with a sharding, each device does so for its own sequences.

    Args:
      whole: a pytree of arrays that every device has whole, such as parameters. Their gradients are summed.
      arrays: pytrees. Each device gets its own part of the first leaf's B sequences; leaves whose first axis is shorter
        are the same for all. Leaves that are not arrays pass through unchanged.

    Returns: the function's arrays [B, ...].
    """
    if sharding is None:
        return function(whole, *arrays)
    result, _ = _mapped(lambda whole, arrays, _: (function(whole, *arrays), None), sharding, whole, arrays, None)
    return result


def map_method[Result, Cache](
    method: Callable[..., tuple[Result, Cache]], sharding: MoESharding | None, *, besides: str
) -> Callable[..., tuple[Result, Cache]]:
    """Runs `method(module, *arrays, cache)` as `map_sequences` does, with the module's parameters whole.

    The cache is None or a pytree of arrays [layers, B, ...]; the method returns the same as its second result. The
    keyword argument names a submodule that the method does not use.
    """
    if sharding is None:
        return method

    def on_devices(module: nnx.Module, *arrays: object) -> tuple[Result, Cache]:
        graphdef, state, *others = nnx.split(module, lambda path, _: besides not in path, ...)

        def function(state: object, arrays: tuple[object, ...], cache: object) -> tuple[Result, Cache]:
            return method(nnx.merge(graphdef, state, *others), *arrays, cache)

        return _mapped(function, sharding, state, arrays[:-1], arrays[-1])

    return on_devices


def _mapped[Result, Cache](
    function: Callable[..., tuple[Result, Cache]],
    sharding: MoESharding,
    whole: object,
    arrays: tuple[object, ...],
    cache: object,
) -> tuple[Result, Cache]:
    """Computes `function(whole, arrays, cache)` in `jax.shard_map`; it returns arrays of sequences and a cache."""
    leaves, structure = jax.tree.flatten(arrays)
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
    own = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
    tokens, batch = sharding.token_spec, own[0].shape[0]
    of_cache = P(None, *tokens)

    def on_device(whole: object, own: list[jax.Array], cache: object) -> tuple[Result, Cache]:
        parts = iter(own)
        given = [next(parts) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
        return function(whole, jax.tree.unflatten(structure, given), cache)

    specs = [tokens if array.ndim and array.shape[0] == batch else P() for array in own]
    return jax.shard_map(on_device, mesh=sharding.mesh, in_specs=(P(), specs, of_cache), out_specs=(tokens, of_cache))(
        whole, own, cache
    )
