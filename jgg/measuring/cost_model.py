"""What an MoE layer costs on many devices: bytes on each link, FLOPs and memory of a device. A model, no measurement.

Forward and backward of the experts, every device with the same load. Collectives move what rings move, a collective
over several nodes brings each byte into a node once, and nothing overlaps. There is no latency in it. docs/scaling.md
has the formulas and what they leave out.
"""

import dataclasses
from typing import NamedTuple

from jgg.experts.exchange import EXCHANGES
from jgg.measuring.workloads import Layer

BYTES = 2  # of an activation or a weight in bfloat16
STATE_BYTES = 16  # of a parameter: float32 value, gradient and two moments of Adam
FAMILIES = ("data", "fsdp", *EXCHANGES, "tensor")
PASSES = 2  # forward and backward move the same tokens and rows


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices and what joins them.

    Attributes:
      devices: in nodes of `node_size`.
      link: bytes a second that a device sends inside its node.
      network: bytes a second that a device sends to other nodes.
      flops: a second, that a device reaches on this layer alone.
      memory: bytes of a device.
    """

    devices: int
    node_size: int = 8
    link: float = 450e9
    network: float = 50e9
    flops: float = 400e12
    memory: float = 141e9

    def inside(self, size: int, stride: int) -> int:
        """How many of a group of `size` devices, `stride` apart, share a node."""
        return max(1, min(size, self.node_size // stride))


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How the layer is split: tensor x expert x replicas devices, neighbours along tensor, then along expert.

    Attributes:
      exchange: of `jgg.sharding.MoESharding`.
      fsdp: the replicas store a part of the weights each, rather than all of them.
      buffer_factor: of MoESharding, for the memory.
    """

    tensor: int = 1
    expert: int = 1
    replicas: int = 1
    exchange: str = "all_gather"
    fsdp: bool = False
    buffer_factor: float = 1.25

    @property
    def devices(self) -> int:
        """Of the mesh."""
        return self.tensor * self.expert * self.replicas

    @property
    def family(self) -> str:
        """Which of FAMILIES it belongs to, by what splits the layer, whatever is done besides."""
        if self.tensor > 1:
            return "tensor"
        return self.exchange if self.expert > 1 else "fsdp" if self.fsdp else "data"

    def __str__(self):
        """Such as "expert 8 by all_gather, fsdp 4"."""
        parts = [f"tensor {self.tensor}"] if self.tensor > 1 else []
        parts += [f"expert {self.expert} by {self.exchange}"] if self.expert > 1 else []
        parts += [f"{'fsdp' if self.fsdp else 'data'} {self.replicas}"] if self.replicas > 1 else []
        return ", ".join(parts) or "one device"


class Traffic(NamedTuple):
    """Bytes that a device sends: over the links of its node, and over the network."""

    link: float = 0.0
    network: float = 0.0


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of a forward and backward pass, for each device.

    Attributes:
      traffic: bytes sent.
      exchange: those of them that take tokens to experts and back.
      minimum: what an exchange would send that moves each token once to each device that needs it, and back.
      flops: floating-point operations.
      memory: bytes of the weights' state, gathered weights, what the backward pass keeps, and the exchange's buffers.
      seconds: computation, then communication.
      efficiency: of computation in seconds.
    """

    traffic: Traffic
    exchange: float
    minimum: float
    flops: float
    memory: float
    seconds: float
    efficiency: float


def cost(layer: Layer, strategy: Strategy, cluster: Cluster) -> Cost:
    """What a strategy costs a layer with `layer.tokens` tokens for each device."""
    tokens = layer.tokens * strategy.tensor  # a tensor group has the tokens of all its devices
    weights = BYTES * 3 * layer.hidden * layer.expert_intermediate * layer.experts / (strategy.expert * strategy.tensor)
    exchange, minimum = _exchange(layer, strategy, cluster, tokens)
    parts = exchange, _tensor_sums(layer, strategy, cluster, tokens), _replicas(strategy, cluster, weights)
    traffic = Traffic(*map(sum, zip(*parts, strict=True)))
    flops = 18.0 * layer.tokens * layer.topk * layer.hidden * layer.expert_intermediate
    compute = flops / cluster.flops
    seconds = compute + traffic.link / cluster.link + traffic.network / cluster.network
    memory = _memory(layer, strategy, tokens, weights)
    return Cost(traffic, sum(exchange), minimum, flops, memory, seconds, compute / seconds)


def _exchange(layer, strategy, cluster, tokens) -> tuple[Traffic, float]:
    """There and back, in both passes; and the least that could be moved."""
    devices = strategy.expert
    inside = cluster.inside(devices, strategy.tensor)
    token = 2 * PASSES * tokens * layer.hidden * BYTES
    reached = (devices - 1) * (1 - (1 - 1 / devices) ** layer.topk)  # other devices that a token needs, at random
    if strategy.exchange == "all_gather":
        return _gather(token, devices, inside), token * reached
    row = token * layer.topk / devices
    return Traffic(row * (inside - 1), row * (devices - inside)), token * reached


def _tensor_sums(layer, strategy, cluster, tokens) -> Traffic:
    """y in the forward pass and dx in the backward pass: a reduce-scatter and an all-gather each."""
    part = tokens * layer.hidden * BYTES / strategy.tensor
    return _gather(2 * PASSES * part, strategy.tensor, cluster.inside(strategy.tensor, 1))


def _replicas(strategy, cluster, weights) -> Traffic:
    """Gradients are summed; with fsdp weights are gathered in both passes and gradients reduce-scattered."""
    inside = cluster.inside(strategy.replicas, strategy.tensor * strategy.expert)
    times = 3 if strategy.fsdp else 2
    return _gather(times * weights / strategy.replicas, strategy.replicas, inside)


def _gather(part, devices, inside) -> Traffic:
    """An all-gather, or the other way a reduce-scatter, of `part` bytes of each device; a node gets each once."""
    return Traffic(part * (devices - 1), part * (devices - inside) / inside)


def _memory(layer, strategy, tokens, weights) -> float:
    stored = weights / BYTES * STATE_BYTES / (strategy.replicas if strategy.fsdp else 1)
    factor = min(strategy.buffer_factor, strategy.expert) if strategy.expert > 1 else 1.0
    rows = tokens * layer.topk * factor
    is_ragged = strategy.exchange == "ragged_all_to_all" and strategy.expert > 1
    here = tokens if is_ragged else tokens * strategy.expert  # those that all_gather brings
    kept_x = (rows if is_ragged else here) * layer.hidden
    kept = kept_x + rows * 2 * layer.expert_intermediate / strategy.tensor
    buffers = (2 * rows + 2 * here) * layer.hidden  # rows and their results; x and y
    return stored + weights + (kept + buffers) * BYTES


def strategies(layer: Layer, cluster: Cluster, buffer_factor: float = 1.25) -> list[Strategy]:
    """All that divide the devices, the experts and their features by powers of two; tensor within a node."""
    found = []
    for tensor in powers_of_two(min(cluster.node_size, cluster.devices)):
        for expert in powers_of_two(cluster.devices // tensor):
            if layer.expert_intermediate % tensor or layer.experts % expert or cluster.devices % (tensor * expert):
                continue
            replicas = cluster.devices // (tensor * expert)
            for exchange in EXCHANGES if expert > 1 else ("all_gather",):
                for fsdp in (False, True) if replicas > 1 else (False,):
                    found.append(Strategy(tensor, expert, replicas, exchange, fsdp, buffer_factor))
    return found


def best(layer: Layer, cluster: Cluster, candidates: list[Strategy]) -> list[tuple[Strategy, Cost]]:
    """Those that fit the memory, the fastest first; of equals the one that needs less memory."""
    costs = [(strategy, cost(layer, strategy, cluster)) for strategy in candidates]
    fitting = [pair for pair in costs if pair[1].memory <= cluster.memory]
    return sorted(fitting, key=lambda pair: (pair[1].seconds, pair[1].memory))


def powers_of_two(limit: int) -> list[int]:
    """From 1 to the limit."""
    return [2**i for i in range(limit.bit_length())]
