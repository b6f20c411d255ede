"""How fast a whole MoE layer is on several devices, at the same tokens for each, by every strategy."""

import dataclasses
import statistics
import time
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jgg.layers import MoELayer
from jgg.measuring.collectives import bytes_sent
from jgg.measuring.cost_model import BYTES, FAMILIES, Cluster, Strategy, cost, strategies
from jgg.measuring.workloads import Layer
from jgg.sharding import MoESharding, map_tokens

REPEATS = 7


@dataclasses.dataclass(frozen=True)
class StrategyRow:
    """What was measured of forward and backward of a layer, router included, by one strategy.

    Attributes:
      strategy: what was measured.
      seconds: of a step, the median of several.
      tokens: of all devices.
      moved: bytes that a device sends: those of the compiled program's collectives and, of a ragged exchange, those of
        the cost model.
      minimum: what the cost model says an exchange would move that sends each token to each device just once.
      overflow: rows that found no room.
      load: rows of the experts of the fullest device, over the mean.
      error: of y, for the tokens of the first device: root mean square, relative to y's. (Not the largest error: of two
        experts that a token likes alike to the last bit, devices may choose different ones.)
    """

    strategy: Strategy
    seconds: float
    tokens: int
    moved: float
    minimum: float
    overflow: int
    load: float
    error: float

    def efficiency(self, one_device: "StrategyRow") -> float:
        """Tokens a second of a device, over those of one device alone."""
        return self.tokens / self.seconds / self.strategy.devices / (one_device.tokens / one_device.seconds)


def choose_strategies(
    layer: Layer, devices: int, buffer_factor: float, families: Iterable[str] = FAMILIES
) -> list[Strategy]:
    """Those of the families that the layer can be split by: each alone, and experts over half of the devices too."""
    if devices == 1:
        return [Strategy()]
    found = [
        strategy
        for strategy in reversed(strategies(layer, Cluster(devices, node_size=devices), buffer_factor))
        if strategy.tensor in (1, devices) and strategy.expert in (1, devices, max(2, devices // 2))
        if not (strategy.fsdp and strategy.expert > 1)
    ]
    return [strategy for family in families for strategy in found if strategy.family == family]


def measure(layer: Layer, strategy: Strategy, dtype="bfloat16", steps: int = 10) -> StrategyRow:
    """Times a step on the first devices that JAX sees, `layer.tokens` tokens for each.

    Args:
      dtype: of the computation and the experts' weights.
      steps: in a repeat, one after the other without waiting for the host.
    """
    module = MoELayer(layer.hidden, layer.expert_intermediate, layer.experts, layer.topk, interleaved=True)
    sharding = _sharding(strategy)
    params, x, dy = _data(module, sharding, layer.tokens * strategy.devices, dtype)

    def loss(params, x):
        y, metrics = module.apply(params, x, sharding=sharding)
        return _sum_of_products(y, dy, sharding), (y, metrics)

    program = jax.jit(jax.grad(loss, (0, 1), has_aux=True)).lower(params, x).compile()
    _, (y, metrics) = jax.block_until_ready(program(params, x))
    estimate = cost(layer, strategy, Cluster(strategy.devices, node_size=strategy.devices))
    moved = bytes_sent(str(program.as_text()))
    if strategy.exchange == "ragged_all_to_all":
        moved += estimate.exchange * jnp.dtype(dtype).itemsize / BYTES
    rows = np.asarray(metrics.group_sizes).reshape(strategy.expert, -1).sum(axis=1)
    return StrategyRow(
        strategy=strategy,
        seconds=_seconds(program, params, x, steps),
        tokens=len(x),
        moved=moved,
        minimum=estimate.minimum * jnp.dtype(dtype).itemsize / BYTES,
        overflow=int(metrics.overflow),
        load=float(rows.max() / rows.mean()),
        error=_error(module, params, x, y, layer.tokens),
    )


def _sharding(strategy) -> MoESharding:
    devices = np.array(jax.devices()[: strategy.devices]).reshape(strategy.replicas, strategy.expert, strategy.tensor)
    mesh = jax.sharding.Mesh(devices, ("replicas", "expert", "tensor"))
    return MoESharding(
        mesh,
        **{"fsdp" if strategy.fsdp else "data": "replicas"},
        expert="expert" if strategy.expert > 1 else None,
        tensor="tensor" if strategy.tensor > 1 else None,
        exchange=strategy.exchange,
        buffer_factor=strategy.buffer_factor,
    )


def _data(module, sharding, tokens, dtype):
    """Random parameters, x and dy, split over the mesh as they are made."""
    keys = iter(jax.random.split(jax.random.key(0), len(module.shapes) + 2))
    specs = dict.fromkeys(module.shapes, jax.P()) | sharding.weight_specs("ekn")

    def normal(shape, spec, scale, dtype):
        make = jax.jit(lambda key: jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype),
                       out_shardings=sharding.named(spec))  # fmt: skip
        return make(next(keys))

    params = {
        name: normal(shape, specs[name], shape[-2] ** -0.5, jnp.float32 if name == "w_router" else dtype)
        for name, shape in module.shapes.items()
    }
    shape = (tokens, module.in_features)
    return params, *(normal(shape, sharding.token_spec, 1, dtype) for _ in range(2))


def _sum_of_products(y, dy, sharding):
    """sum(y * dy), added up where y is."""

    def on_device(arrays):
        product = arrays["y"].astype(jnp.float32) * arrays["dy"].astype(jnp.float32)
        return jax.lax.psum(jnp.sum(product), sharding.token_axes)

    return map_tokens(on_device, sharding, {"y": y, "dy": dy}, {}, jax.P())


def _seconds(program, params, x, steps):
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = None
        for _ in range(steps):
            result = program(params, x)
        jax.block_until_ready(result)
        seconds.append((time.perf_counter() - start) / steps)
    return statistics.median(seconds)


def _error(module, params, x, y, tokens):
    """Of y, against the same layer on one device."""
    here = jax.devices()[0]
    params, x, y = jax.device_put((params, x[:tokens], y[:tokens]), here)
    want = jax.jit(module.apply)(params, x)[0].astype(jnp.float32)
    return float(jnp.linalg.norm(y.astype(jnp.float32) - want) / jnp.linalg.norm(want))
