"""The strategies that `benchmarks.scale` measures: ways to split an MoE layer over devices."""

import dataclasses
from collections.abc import Iterable

from jgg.core.choices import EXCHANGES
from jgg.tuning.workloads import Layer

FAMILIES = ("data", "fsdp", *EXCHANGES, "tensor")


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to split a layer over tensor * expert * replicas devices.

    Neighbouring devices differ along tensor first, then along expert, then along replicas.

    Attributes:
      exchange: as in `jgg.sharding.MoESharding`.
      fsdp: True if each replica stores a part of the weights, False if each stores all of them.
      buffer_factor: as in `jgg.sharding.MoESharding`.
    """

    tensor: int = 1
    expert: int = 1
    replicas: int = 1
    exchange: str = "all_gather"
    fsdp: bool = False
    buffer_factor: float = 1.25

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return self.tensor * self.expert * self.replicas

    @property
    def family(self) -> str:
        """The member of FAMILIES to which the strategy belongs."""
        if self.tensor > 1:
            return "tensor"
        return self.exchange if self.expert > 1 else "fsdp" if self.fsdp else "data"

    def __str__(self):
        """The strategy in words, such as "expert 8 by all_gather, data 4"."""
        parts = [f"tensor {self.tensor}"] if self.tensor > 1 else []
        parts += [f"expert {self.expert} by {self.exchange}"] if self.expert > 1 else []
        parts += [f"{'fsdp' if self.fsdp else 'data'} {self.replicas}"] if self.replicas > 1 else []
        return ", ".join(parts) or "one device"


def choose_strategies(
    layer: Layer, devices: int, buffer_factor: float, families: Iterable[str] = FAMILIES
) -> list[Strategy]:
    """Returns the strategies of these families that can split the layer over `devices`, which is a power of two.

    Each family splits over all devices. An exchange also splits the experts over half of the devices, with two
    replicas.
    """
    if devices == 1:
        return [Strategy()]
    found = []
    for family in families:
        if family == "data":
            found.append(Strategy(replicas=devices))
        elif family == "fsdp":
            found.append(Strategy(replicas=devices, fsdp=True))
        elif family == "tensor":
            found.append(Strategy(tensor=devices))
        else:
            counts = dict.fromkeys((devices, max(2, devices // 2)))
            found += [Strategy(expert=count, replicas=devices // count, exchange=family) for count in counts]
    splits = [dataclasses.replace(strategy, buffer_factor=buffer_factor) for strategy in found]
    return [s for s in splits if layer.experts % s.expert == 0 and layer.expert_intermediate % s.tensor == 0]


def powers_of_two(limit: int) -> list[int]:
    """The powers of two from 1 to the limit."""
    return [2**i for i in range(limit.bit_length())]
