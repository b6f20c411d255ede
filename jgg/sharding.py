"""Experts, their features and tokens split over the devices of a mesh; `import jgg.sharding`."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike, DTypeLike

from jgg.activations import ActivationLike, find_activation
from jgg.core.arguments import as_array, as_arrays, as_flag, as_int, as_names, check, check_instance, check_one_of
from jgg.core.gpu_target import current_target
from jgg.core.manual_axes import vary_over
from jgg.core.problem import W_LAYOUTS, check_choices, check_mlp
from jgg.experts.exchange import EXCHANGES, Placement
from jgg.experts.mlp import RESIDUAL_NAMES
from jgg.experts.moe import moe_mlp
from jgg.fp8 import Fp8
from jgg.launching.choice import How
from jgg.router.routing import Routing, sort_by_expert

P = jax.P
# Left to the collective that sums the gradient of x while that of w_gate_up is computed; kernels/trials.md has others.
_SPARE_SMS = 24


@dataclasses.dataclass(frozen=True)
class MoESharding:
    """Which mesh axis splits what. Any combination works. Devices along other mesh axes do the same work.

    | axis | tokens | weights | communication, forward |
    | --- | --- | --- | --- |
    | data | split | replicated | none (gradients of weights are summed) |
    | fsdp | split | stored split over H | weights are gathered (gradients are reduce-scattered) |
    | expert | split | split over E | tokens go to their experts and back, by `exchange` |
    | tensor | replicated | split over I | y is summed |

    Args:
      mesh: of Auto or Explicit axes.
      data: one axis or several.
      fsdp, expert, tensor: an axis each.
      exchange: "all_gather" (every device gets all tokens along `expert`, and results are reduce-scattered; it moves
        less data on fewer than k devices) or "ragged_all_to_all" (each routed row goes to its expert's device). Both
        give the same y and drop the same rows.
      buffer_factor: a device's buffer holds buffer_factor times its even share of routed rows, T * k for its T tokens.
        Rows beyond that are dropped (they add nothing to y) and counted. None has room for all rows (the same as
        buffer_factor = number of devices along `expert`) and takes more memory.
    """

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    data: str | tuple[str, ...] = ()
    fsdp: str | None = None
    expert: str | None = None
    tensor: str | None = None
    exchange: str = "all_gather"
    buffer_factor: float | None = None

    def __post_init__(self) -> None:
        kinds = jax.sharding.Mesh | jax.sharding.AbstractMesh
        check_instance("mesh", self.mesh, kinds, "a jax.sharding.Mesh or AbstractMesh")
        if isinstance(self.data, str):
            object.__setattr__(self, "data", (self.data,))
        check_instance("data", self.data, tuple | list, "the name of a mesh axis or a tuple of names")
        object.__setattr__(self, "data", tuple(self.data))
        axes = [("data", axis) for axis in self.data]
        axes += [(name, axis) for name in ("fsdp", "expert", "tensor") if (axis := getattr(self, name)) is not None]
        used, known = [axis for _, axis in axes], tuple(self.mesh.axis_names)
        for name, axis in axes:
            if axis not in known:
                raise ValueError(f"{name} must be of the mesh's axes {known}, got {axis!r}.")
            if used.count(axis) > 1:
                raise ValueError(f"{name} must name an axis that no other does, got {axis!r} more than once.")
        check_one_of("exchange", self.exchange, EXCHANGES)
        factor = self.buffer_factor
        if factor is not None:
            if not isinstance(factor, numbers.Real) or isinstance(factor, bool) or not factor > 0:
                raise ValueError(f"buffer_factor must be None or a number greater than 0, got {factor!r}.")
            object.__setattr__(self, "buffer_factor", float(factor))

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes over which tokens are split."""
        return (*self.data, *(axis for axis in (self.fsdp, self.expert) if axis is not None))

    @property
    def token_spec(self) -> P:
        """PartitionSpec of x, y [T, H] and every other array with one row per token."""
        return P(self.token_axes or None)

    def size(self, *axes: str | None) -> int:
        """Number of devices along the axes together."""
        return math.prod(self.mesh.shape[axis] for axis in axes if axis is not None)

    def capacity(self, num_rows: int) -> int:
        """Rows in a device's buffer, for `num_rows` = T * k routed rows of its own tokens."""
        devices = self.size(self.expert)
        return math.ceil(min(self.buffer_factor or devices, devices) * num_rows)

    def weight_specs(self, w_layout: str = "enk") -> dict[str, P]:
        """PartitionSpecs of w_gate_up, w_down, b_gate_up and b_down by name; layers use w_layout="ekn"."""
        check_one_of("w_layout", w_layout, W_LAYOUTS)
        up, down = (self.fsdp, self.tensor), (self.tensor, self.fsdp)
        if w_layout == "enk":
            up, down = down, up
        return {
            "w_gate_up": P(self.expert, *up),
            "w_down": P(self.expert, *down),
            "b_gate_up": P(self.expert, self.tensor),
            "b_down": P(self.expert, None),
        }

    def named(self, spec: P) -> jax.NamedSharding:
        """A PartitionSpec on this mesh."""
        return jax.NamedSharding(self.mesh, spec)

    def split_init(self, init: Callable[..., jax.Array], name: str) -> Callable[..., jax.Array]:
        """The initializer of a layer's parameter, whose result comes into being split."""
        spec = self.weight_specs("ekn").get(name, P())
        split = jax.jit(init, static_argnums=(1, 2), out_shardings=self.named(spec))

        def checked(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
            _check_divides(name, shape, spec, self)
            return split(key, shape, dtype)

        return checked


def sharded_moe_mlp(
    x: ArrayLike,
    w_gate_up: ArrayLike,
    w_down: ArrayLike,
    topk_weights: ArrayLike,
    topk_indices: ArrayLike,
    *,
    sharding: MoESharding,
    b_gate_up: ArrayLike | None = None,
    b_down: ArrayLike | None = None,
    activation: ActivationLike = "swiglu",
    interleaved: bool = False,
    w_layout: str = "enk",
    precision: jax.lax.PrecisionLike = None,
    quantization: Fp8 | None = None,
    implementation: str | None = None,
    residual_names: Mapping[str, str] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`jgg.moe_mlp` on a mesh: experts may be on other devices than their tokens.

    Differentiable in x, the weights, the biases and topk_weights. Communication is JAX's own collectives.

    Shapes as in `jgg.moe_mlp`, of the whole arrays: T tokens of all devices, E experts of all devices.

    Args:
      x: [T, H], split as `sharding.token_spec`.
      w_gate_up, w_down, b_gate_up, b_down: as in `jgg.moe_mlp`, split as `sharding.weight_specs(w_layout)`.
      topk_weights: float [T, k].
      topk_indices: integer [T, k], the expert of each choice; a row whose expert lies outside [0, E) adds nothing.
      sharding: which mesh axis splits what, and by which exchange.
      interleaved: as in `jgg.moe_mlp`; must be True for a gated activation split over a tensor axis, so that a gate
        and its up feature are on the same device: see `interleave`.
      activation, w_layout, precision, quantization, implementation, residual_names: as in `jgg.moe_mlp`.

    Returns:
      y [T, H] in the dtype of x, split like x, and the overflow: int32 scalar, how many of the T * k rows found no
      room in the buffers of `sharding.buffer_factor` and so added nothing to y.

    Raises:
      ValueError: shapes disagree with each other or with the mesh; on Explicit axes also if the weights are split in
        another way than `sharding.weight_specs` says.
      TypeError: a dtype is unsupported.
    """
    check_instance("sharding", sharding, MoESharding, "a jgg.sharding.MoESharding")
    arrays = as_arrays(
        {
            "x": x, "w_gate_up": w_gate_up, "w_down": w_down, "topk_weights": topk_weights,
            "topk_indices": topk_indices, "b_gate_up": b_gate_up, "b_down": b_down,
        },
        may_be_none=("b_gate_up", "b_down"),
    )  # fmt: skip
    check_mlp(arrays, find_activation(activation), w_layout)
    check_choices(arrays["x"], arrays["topk_weights"], arrays["topk_indices"])
    arrays = {name: array for name, array in arrays.items() if array is not None}
    on_device = functools.partial(
        moe_mlp_on_device, sharding=sharding, activation=activation, interleaved=interleaved, w_layout=w_layout,
        precision=precision, quantization=quantization, implementation=implementation, residual_names=residual_names,
    )  # fmt: skip
    specs = sharding.weight_specs(w_layout)
    return map_tokens(lambda arrays: on_device(**arrays), sharding, arrays, specs, (sharding.token_spec, P()))


def map_tokens[Result](
    function: Callable[[dict[str, Any]], Result], sharding: MoESharding, arrays: dict[str, jax.Array],
    specs: dict[str, P], out_specs: P | tuple[P, ...],
) -> Result:  # fmt: skip
    """`function(arrays)` under `jax.shard_map`; arrays that `specs` does not name have a row for each token."""
    specs = {name: specs.get(name, sharding.token_spec) for name in arrays}
    for name, array in arrays.items():
        _check_divides(name, jnp.shape(array), specs[name], sharding)
    arrays = {name: _placed(name, array, specs[name], sharding) for name, array in arrays.items()}
    return jax.shard_map(function, mesh=sharding.mesh, in_specs=(specs,), out_specs=out_specs)(arrays)


def _check_divides(name: str, shape: tuple[int, ...], spec: P, sharding: MoESharding) -> None:
    for axis, (size, names) in enumerate(zip(shape, spec, strict=False)):
        names = names if isinstance(names, tuple) else (names,)
        devices = sharding.size(*names)
        if size % devices:
            along = " and ".join(repr(name) for name in names)
            raise ValueError(
                f"{name} must have a multiple of {devices} along axis {axis}, the devices along {along} of the mesh, "
                f"got {list(shape)}."
            )


def _placed(name: str, array: jax.Array, spec: P, sharding: MoESharding) -> jax.Array:
    """On Explicit axes, the array split as spec says; weights only where nothing of them has to move."""
    if jax.sharding.AxisType.Explicit not in sharding.mesh.axis_types:
        return array
    spec = P(*spec, *[None] * (array.ndim - len(spec)))
    got = jax.typeof(array).sharding.spec
    if name.startswith(("w_", "b_")) and got != spec and any(part is not None for part in got):
        raise ValueError(f"{name} must be split as {spec} by sharding.weight_specs, got {got}.")
    return jax.sharding.reshard(array, sharding.named(spec))


def moe_mlp_on_device(
    x: jax.Array, w_gate_up: jax.Array, w_down: jax.Array, topk_weights: jax.Array, topk_indices: jax.Array, *,
    sharding: MoESharding, b_gate_up: jax.Array | None = None, b_down: jax.Array | None = None,
    activation: ActivationLike = "swiglu", interleaved: bool = False, w_layout: str = "enk", **options: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`sharded_moe_mlp` for use inside your own `jax.shard_map`: each array is this device's shard.

    Returns: y [T, H] of this device's tokens, and the overflow of all devices together.
    """
    check_choices(x, topk_weights, topk_indices)
    check_interleaved(interleaved, activation, sharding)
    spare_sms = _SPARE_SMS if sharding.size(sharding.expert, sharding.tensor) > 1 else 0
    num_experts, num_rows = w_gate_up.shape[0], topk_indices.shape[0] * topk_indices.shape[1]
    if sharding.tensor is not None:
        # gradients are summed over the axis as they come back to here: [T, H], not the rows of the exchange
        x, topk_weights = (vary_over(frozenset({sharding.tensor}), array) for array in (x, topk_weights))
        if b_down is not None:  # added on one of the devices whose results are summed
            b_down = jnp.where(jax.lax.axis_index(sharding.tensor) == 0, b_down, jnp.zeros_like(b_down))

    def compute(
        x: jax.Array, topk_weights: jax.Array, w_gate_up: jax.Array, w_down: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        if sharding.fsdp is not None:
            specs = sharding.weight_specs(w_layout)
            w_gate_up, w_down = (
                jax.lax.all_gather(w, sharding.fsdp, axis=specs[name].index(sharding.fsdp), tiled=True)
                for name, w in (("w_gate_up", w_gate_up), ("w_down", w_down))
            )

        def mlp(rows: jax.Array, routing: Routing) -> jax.Array:
            routing = checkpoint_name(routing, "jgg_routing")
            return moe_mlp(
                rows, w_gate_up, w_down, routing, activation=activation, interleaved=interleaved, b_gate_up=b_gate_up,
                b_down=b_down, w_layout=w_layout, spare_sms=spare_sms, expected_rows=num_rows or None, **options,
            )  # fmt: skip

        if sharding.expert is None:
            sorted_rows = sort_by_expert(topk_indices, num_experts, options.get("implementation"))
            routing = Routing(topk_weights, topk_indices, *sorted_rows)
            return mlp(x, routing), jnp.int32(0)
        placement = Placement(sharding.expert, num_experts, sharding.capacity(num_rows))
        how = How(options.get("implementation"), current_target())
        return EXCHANGES[sharding.exchange](x, topk_weights, topk_indices, mlp, placement, how)

    if sharding.fsdp is not None:  # the gathered weights are not kept, but gathered again in the backward pass
        names = as_names("residual_names", options.get("residual_names"), RESIDUAL_NAMES).values()
        compute = jax.checkpoint(compute, policy=jax.checkpoint_policies.save_only_these_names(*names, "jgg_routing"))
    y, overflow = compute(x, topk_weights, w_gate_up, w_down)
    if sharding.tensor is not None:
        y = jax.lax.psum(y, sharding.tensor)
    return y, overflow if sharding.expert is None else jax.lax.psum(overflow, sharding.token_axes)


def check_interleaved(interleaved: bool, activation: ActivationLike, sharding: MoESharding) -> None:
    """Raises where gates and the ups that they are multiplied with would be on different devices."""
    interleaved = as_flag("interleaved", interleaved)
    if sharding.size(sharding.tensor) > 1 and find_activation(activation).is_gated and not interleaved:
        raise ValueError(
            "interleaved must be True with a tensor axis and a gated activation, whose gates and ups would be on "
            "different devices: w_gate_up = jgg.sharding.interleave(w_gate_up, axis), got False."
        )


def interleave(array: ArrayLike, axis: int = -1) -> jax.Array:
    """Reorders features along `axis` from all gates, all ups (g0 g1 ... u0 u1 ...) to alternating (g0 u0 g1 u1 ...).

    For w_gate_up and b_gate_up of a layer with `interleaved=True`, as a tensor axis needs it.
    """
    array, axis = as_array("array", array), as_int("axis", axis)
    shape = array.shape
    check(len(shape) > 0, "array must have at least one axis, got [].")
    check(-len(shape) <= axis < len(shape), f"axis must be of the array's {len(shape)} axes, got {axis}.")
    axis %= len(shape)
    check(shape[axis] % 2 == 0, f"array must have 2 * I features along axis {axis}, got {list(shape)}.")
    halves = jnp.reshape(array, (*shape[:axis], 2, shape[axis] // 2, *shape[axis + 1 :]))
    return jnp.reshape(jnp.swapaxes(halves, axis, axis + 1), shape)
