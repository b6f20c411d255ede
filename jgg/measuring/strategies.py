"""The ways to split an MoE layer over devices that `jgg scale` measures."""

import dataclasses
from collections.abc import Iterable

from jgg.experts.exchange import EXCHANGES
from jgg.measuring.workloads import Layer

FAMILIES = ("data", "fsdp", *EXCHANGES, "tensor")


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How the layer is split: tensor x expert x replicas devices, neighbours along tensor, then along expert.

    Attributes:
      exchange: of `jgg.sharding.MoESharding`.
      fsdp: the replicas store a part of the weights each, rather than all of them.
      buffer_factor: of MoESharding.
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
        """Which of FAMILIES it belongs to."""
        if self.tensor > 1:
            return "tensor"
        return self.exchange if self.expert > 1 else "fsdp" if self.fsdp else "data"

    def __str__(self):
        """Such as "expert 8 by all_gather, data 4"."""
        parts = [f"tensor {self.tensor}"] if self.tensor > 1 else []
        parts += [f"expert {self.expert} by {self.exchange}"] if self.expert > 1 else []
        parts += [f"{'fsdp' if self.fsdp else 'data'} {self.replicas}"] if self.replicas > 1 else []
        return ", ".join(parts) or "one device"


def choose_strategies(
    layer: Layer, devices: int, buffer_factor: float, families: Iterable[str] = FAMILIES
) -> list[Strategy]:
    """The strategies of the families that can split the layer over a power of two of devices.

    Each family is tried alone, and the exchanges also with experts over half of the devices beside data.
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
