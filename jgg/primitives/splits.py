"""How XLA's partitioner splits the arrays of a `custom_partitioning`, in the names of mesh axes."""

import math
from typing import NamedTuple, Self

import jax
import numpy as np

Names = tuple[str, ...]


class Split(NamedTuple):
    """An array and how devices split it.

    Attributes:
      shape: of the whole array.
      names: for each axis of the array the mesh axes that split it, () if each device has it whole, or None if a part
        of a mesh axis splits it, which no NamedSharding can express.
      ways: for each axis the number of parts.
      given: the sharding, for messages.
    """

    shape: tuple[int, ...]
    names: tuple[Names | None, ...]
    ways: tuple[int, ...]
    given: object

    @classmethod
    def of(cls, array: jax.ShapeDtypeStruct, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Self:
        """The split of an array over the devices of a mesh; an array without a sharding is whole on each device.

        `custom_partitioning` gives a NamedSharding only if asked to decode what XLA has. It then fails where a part of
        a mesh axis splits an array: 2 of the 8 devices along an axis, after a reshape of [6, 2] to [12]. So it is not
        asked, and this function decodes.
        """
        sharding = array.sharding
        if sharding is None or sharding.is_fully_replicated:
            return cls(array.shape, ((),) * array.ndim, (1,) * array.ndim, jax.P())
        if isinstance(sharding, jax.NamedSharding):
            spec = (*sharding.spec, *[None] * (array.ndim - len(sharding.spec)))
            names: list[Names | None] = [each if isinstance(each, tuple) else (each,) if each else () for each in spec]
            ways = [math.prod(mesh.shape[name] for name in own or ()) for own in names]
            return cls(array.shape, tuple(names), tuple(ways), sharding.spec)
        starts = _starts(sharding, array.ndim)
        ways = [len(set(own.values())) for own in starts]
        names = [_names_of(own, mesh) if own_ways > 1 else () for own, own_ways in zip(starts, ways, strict=True)]
        given = sharding if None in names else jax.P(*names)
        return cls(array.shape, tuple(names), tuple(ways), given)

    def is_even(self, axis: int) -> bool:
        """Whether all devices have equal parts of an axis."""
        return self.shape[axis] % self.ways[axis] == 0


def _starts(sharding: jax.sharding.Sharding, num_axes: int) -> list[dict[object, int]]:
    """For each axis of an array as long as there are devices, where each device's part starts."""
    indices = sharding.devices_indices_map((len(sharding.device_set),) * num_axes)
    return [{device: own[axis].start or 0 for device, own in indices.items()} for axis in range(num_axes)]


def _names_of(starts: dict[object, int], mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Names | None:
    """The mesh axes, major first, that split an axis whose parts start at `starts`; None if no whole axes do."""
    if isinstance(mesh, jax.sharding.AbstractMesh) or mesh.empty or starts.keys() != set(mesh.devices.flat):
        return None
    grid = np.vectorize(starts.__getitem__)(mesh.devices)
    origin = (0,) * grid.ndim
    lasts = {name: grid[(*origin[:axis], -1, *origin[axis + 1 :])] for axis, name in enumerate(mesh.axis_names)}
    steps = {name: last / (mesh.shape[name] - 1) for name, last in lasts.items() if last > 0}
    names = tuple(sorted(steps, key=lambda name: -steps[name]))
    number = np.zeros_like(grid)  # of each device's part
    for name in names:
        number = number * mesh.shape[name] + np.indices(grid.shape)[mesh.axis_names.index(name)]
    return names if np.array_equal(grid, number * (mesh.size // (number.max() + 1))) else None
