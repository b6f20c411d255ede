"""How a mesh splits experts, their features and tokens: `MoESharding`, and `map_tokens`, which applies it."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jgg.core.activations import ActivationLike, find_activation
from jgg.core.arguments import as_flag, check_instance, check_one_of
from jgg.core.choices import EXCHANGES, FSDP_SPLITS, W_LAYOUTS
from jgg.core.matrix import Factors, Matrix
from jgg.core.quantized import QuantizedArray, block_of
from jgg.linear.lora import adapter_axes, adapter_names

P = jax.P
_WHOLE = P()  # every device has all of it


@dataclasses.dataclass(frozen=True)
class MoESharding:
    """Which mesh axis splits what. Any combination works. Devices along other mesh axes do the same work.

    | axis | tokens | weights | communication, forward |
    | --- | --- | --- | --- |
    | data | split | replicated | none (gradients of weights are summed) |
    | fsdp | split | stored split, as `fsdp_splits` says | weights are gathered (gradients are reduce-scattered) |
    | expert | split | split over E | tokens go to their experts and back, by `exchange` |
    | tensor | replicated | split over I | y is summed |

    Args:
      mesh: a mesh of Auto and Explicit axes in any combination.
      data: one axis, or a tuple of several; () for none.
      fsdp, expert, tensor: one axis each, or None.
      fsdp_splits: how the devices along `fsdp` split w_gate_up, w_down and their adapters: "experts" (each stores some
        whole experts; E must be a multiple of the number of devices along `fsdp` and `expert` together) or "features"
        (each stores a part of H for all experts; slower, because devices must copy what they gathered into order).
      exchange: "all_gather" (every device gets all tokens along `expert`, and results are reduce-scattered) or
        "ragged_all_to_all" (a token goes once to each device that has experts of its choice if there is room for all
        tokens along `expert`, otherwise once per choice). Both give the same y and drop the same rows.
      buffer_factor: a device's buffer holds buffer_factor times its even share of routed rows, T * k for its T tokens.
        Rows beyond that are dropped (they add nothing to y) and counted. None makes room for all rows (as
        buffer_factor = number of devices along `expert` does) and takes more memory.
      prevent_cse: as in `jax.checkpoint`, for the weights that are gathered along `fsdp`, and again in the backward
        pass. Set it to False for layers inside a `jax.lax.scan`, as a Decoder does for its own: a gather then waits
        only for the stored weights, and can overlap with the products of the previous layer. In other programs, False
        would let XLA merge both gathers and keep the whole weights of all layers until the backward pass.
    """

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    data: str | tuple[str, ...] = ()
    fsdp: str | None = None
    expert: str | None = None
    tensor: str | None = None
    fsdp_splits: str = "experts"
    exchange: str = "all_gather"
    buffer_factor: float | None = None
    prevent_cse: bool = True

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
        check_one_of("fsdp_splits", self.fsdp_splits, FSDP_SPLITS)
        check_one_of("exchange", self.exchange, EXCHANGES)
        factor = self.buffer_factor
        if factor is not None:
            if not isinstance(factor, numbers.Real) or isinstance(factor, bool) or not factor > 0:
                raise ValueError(f"buffer_factor must be None or a number greater than 0, got {factor!r}.")
            object.__setattr__(self, "buffer_factor", float(factor))
        object.__setattr__(self, "prevent_cse", as_flag("prevent_cse", self.prevent_cse))

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes that split tokens."""
        return (*self.data, *(axis for axis in (self.fsdp, self.expert) if axis is not None))

    @property
    def token_spec(self) -> P:
        """PartitionSpec of x and y [T, H], and of every other array with one row per token."""
        return P(self.token_axes or None)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split anything."""
        return self.token_axes if self.tensor is None else (*self.token_axes, self.tensor)

    @property
    def gather_axis(self) -> str | None:
        """The axis that stored weights are gathered along: `fsdp`, if it has several devices."""
        return self.fsdp if self.size(self.fsdp) > 1 else None

    def size(self, *axes: str | None) -> int:
        """Number of devices along the axes together."""
        return math.prod(self.mesh.shape[axis] for axis in axes if axis is not None)

    def capacity(self, num_rows: int) -> int:
        """Rows in a device's buffer, for `num_rows` = T * k routed rows of its own tokens."""
        devices = self.size(self.expert)
        return math.ceil(min(self.buffer_factor or devices, devices) * num_rows)

    def weight_specs(self, w_layout: str = "enk") -> dict[str, P]:
        """PartitionSpecs of w_gate_up, w_down, b_gate_up, b_down and LoRA adapters by name; layers use w_layout="ekn".

        The values and scales of a QuantizedArray both have the spec of the weights that they represent. The a and b of
        the `jgg.LowRank` for w_gate_up have the specs "w_gate_up_lora_a" and "w_gate_up_lora_b"; axes that they share
        with w_gate_up are split the same way. The same holds for w_down.
        """
        check_one_of("w_layout", w_layout, W_LAYOUTS)
        axes, features = [self.expert], self.fsdp
        if self.fsdp_splits == "experts":
            axes, features = [self.expert, self.fsdp], None
        experts = tuple(axis for axis in axes if axis is not None)
        weights = {"w_gate_up": (features, self.tensor), "w_down": (self.tensor, features)}
        in_ekn: dict[str, tuple[str | None, ...]] = {**weights}
        for name, split in weights.items():
            in_ekn |= adapter_axes(name, split, None)
        step = 1 if w_layout == "ekn" else -1
        specs = {name: P(experts or None, *split[::step]) for name, split in in_ekn.items()}
        return specs | {"b_gate_up": P(self.expert, self.tensor), "b_down": P(self.expert, None)}

    def named(self, spec: P) -> jax.NamedSharding:
        """The NamedSharding of a PartitionSpec on this mesh."""
        return jax.NamedSharding(self.mesh, spec)

    def split_init(self, init: Callable[..., jax.Array], name: str) -> Callable[..., jax.Array]:
        """An initializer for a layer's parameter of this name, which creates the parameter already split."""
        spec = self.weight_specs("ekn").get(name, P())
        split = jax.jit(init, static_argnums=(1, 2), out_shardings=self.named(spec))

        def checked(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
            self.check_divides(name, shape, spec)
            return split(key, shape, dtype)

        return checked

    def check_split(self, name: str, array: jax.Array | np.ndarray | QuantizedArray | Matrix, spec: P) -> None:
        """Raises if an array, or a part of a Matrix except its factors, cannot be split evenly as a spec says."""
        if isinstance(array, Matrix):
            for part in (array.dense, array.straight):
                if part is not None:
                    self.check_split(name, part, spec)
        elif isinstance(array, QuantizedArray):
            ones = (1,) * (len(array.shape) - 2)
            self.check_divides(name, array.shape, spec, (*ones, *block_of(array, f"{name}.")))
        else:
            self.check_divides(name, jnp.shape(array), spec)

    def check_divides(self, name: str, shape: tuple[int, ...], spec: P, block: tuple[int, ...] | None = None) -> None:
        """Raises if an array cannot be split evenly as a spec says.

        Args:
          block: per axis, how many numbers share a scale and so must be on one device; None for arrays without scales.
        """
        for axis, (size, names) in enumerate(zip(shape, spec, strict=False)):
            names = names if isinstance(names, tuple) else (names,)
            devices, whole = self.size(*names), 1 if block is None else block[axis]
            if devices > 1 and size % (devices * whole):
                along = " and ".join(repr(name) for name in names)
                blocks = f", by blocks of {whole} with one scale" if whole > 1 else ""
                raise ValueError(
                    f"{name} must have a multiple of {devices * whole} along axis {axis}, the devices along {along} of "
                    f"the mesh{blocks}, got {list(shape)}."
                )


def axis_split_over(mesh_axis: str | None, spec: P) -> int | None:
    """The number of the axis that a spec splits over a mesh axis, or None."""
    for number, names in enumerate(spec):
        if mesh_axis in (names if isinstance(names, tuple) else (names,)):
            return number
    return None


def map_tokens[Arrays: NamedTuple, Result](
    function: Callable[[Arrays], Result],
    sharding: MoESharding,
    arrays: Arrays,
    specs: Mapping[str, P],
    out_specs: object,
) -> Result:
    """Computes `function(arrays)` under `jax.shard_map`; arrays that `specs` does not name have one row per token.

    Arrays may be None, or a Matrix, whose factors have the specs of their own names. Its other parts are split alike.
    """
    tokens = sharding.token_spec
    named = {name: array for name, array in arrays._asdict().items() if array is not None}
    for name, array in named.items():
        sharding.check_split(name, array, specs.get(name, tokens))
        for part, factor in zip(adapter_names(name), getattr(array, "factors", None) or (), strict=False):
            sharding.check_split(part, factor, specs.get(part, P()))
    parts = {name: specs_of_parts(name, array, specs, tokens) for name, array in named.items()}
    placed = {
        name: jax.tree.map(functools.partial(_placed, name, sharding), array, parts[name])
        for name, array in named.items()
    }
    arrays, in_specs = arrays._replace(**placed), (arrays._replace(**parts),)
    return jax.shard_map(function, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs)(arrays)


def check_outside_shard_map(sharding: MoESharding) -> None:
    """Raises inside a `jax.shard_map` over axes that the sharding splits or that its mesh does not know."""
    around = jax.sharding.get_abstract_mesh()
    taken = [axis for axis in sharding.axes if axis in around.manual_axes]
    if taken:
        raise ValueError(
            f"sharding must split over axes of the mesh that no jax.shard_map around this call maps over, got {taken}. "
            "Inside jax.shard_map, on each device's own arrays, call jgg.sharding.moe_mlp_on_device."
        )
    if around.manual_axes and sharding.mesh != around:
        raise ValueError(
            "sharding.mesh must be jax.sharding.get_abstract_mesh() inside jax.shard_map over other axes, "
            f"{list(around.manual_axes)}, got {sharding.mesh}."
        )


def check_inside_shard_map(sharding: MoESharding) -> None:
    """Raises outside a `jax.shard_map` over all axes that the sharding splits."""
    for axis in sharding.axes:
        try:
            devices = jax.lax.axis_size(axis)
        except NameError:
            devices = 0
        if devices != sharding.size(axis):
            raise ValueError(
                f"sharding must split over axes of the jax.shard_map around this call, {axis!r} over "
                f"{sharding.size(axis)} devices, got {devices or 'no such axis'}. Outside jax.shard_map, on arrays of "
                "all devices, call jgg.sharding.sharded_moe_mlp."
            )


def specs_of_parts(name: str, array: Any, specs: Mapping[str, P], default: P = _WHOLE) -> Any:
    """Replaces each array in a Matrix or QuantizedArray of this name, or a single array, with its PartitionSpec.

    Args:
      specs: by name, as in `MoESharding.weight_specs`; arrays that it does not name have the `default`.
    """
    spec: Any = specs.get(name, default)
    if isinstance(array, QuantizedArray):
        return QuantizedArray(spec, spec)
    if not isinstance(array, Matrix):
        return spec
    of_transposed = P(spec[0], *spec[:0:-1]) if spec else spec
    return Matrix(
        specs_of_parts(name, array.dense, specs, default) if array.dense is not None else None,
        specs_of_parts(name, array.straight, specs, default) if array.straight is not None else None,
        array.transposed and QuantizedArray(of_transposed, of_transposed),  # type: ignore[arg-type]
        array.factors and Factors._make(specs.get(part, spec) for part in adapter_names(name)),
    )


def _placed(name: str, sharding: MoESharding, array: jax.Array, spec: P) -> jax.Array:
    """The array, split over Explicit axes as `spec` says; raises if weights are already split differently."""
    explicit = _of_explicit_axes(spec, array.ndim, sharding)
    if explicit is None:
        return array
    got = jax.typeof(array).sharding.spec
    if name.startswith(("w_", "b_")) and got != explicit and any(part is not None for part in got):
        raise ValueError(f"{name} must be split as {explicit} by sharding.weight_specs, got {got}.")
    return jax.sharding.reshard(array, sharding.named(explicit))


def _of_explicit_axes(spec: P, num_axes: int, sharding: MoESharding) -> P | None:
    """The part of a spec that types carry, for Explicit axes; None for a mesh that has none."""
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    if jax.sharding.AxisType.Explicit not in kinds.values():
        return None

    def explicit(names: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        names = names if isinstance(names, tuple) else () if names is None else (names,)
        names = tuple(name for name in names if kinds[name] == jax.sharding.AxisType.Explicit)
        return names[0] if len(names) == 1 else names or None

    return P(*map(explicit, (*spec, *[None] * (num_axes - len(spec)))))


def check_interleaved(interleaved: bool, activation: ActivationLike, sharding: MoESharding) -> None:
    """Raises if gates and the ups that they are multiplied with would be on different devices."""
    interleaved = as_flag("interleaved", interleaved)
    if sharding.size(sharding.tensor) > 1 and find_activation(activation).is_gated and not interleaved:
        raise ValueError(
            "interleaved must be True with a tensor axis and a gated activation, whose gates and ups would be on "
            "different devices: w_gate_up = jgg.sharding.interleave(w_gate_up, axis), got False."
        )
