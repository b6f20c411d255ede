"""Checks the options of `jgg bench` and fills in the defaults that depend on the machine."""

import dataclasses
from collections.abc import Mapping
from typing import Self

from jgg.cli import options
from jgg.cli.options import UsageError
from jgg.core.problem import GroupedGemmProblem
from jgg.measuring.peers import PEERS, Peer
from jgg.measuring.workloads import FP8, Layer, gemm

OPS = ("forward", "dx", "dw", "gather")
TIME_LIMIT = 75.0  # seconds; what is measured as they end takes less than as many more
_ELSEWHERE = (
    "in a checkout of jgg, python -m benchmarks.layers measures whole layers, and python -m benchmarks.gemms other"
    " libraries too"
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of `jgg bench`; the JSON file records them too.

    Attributes:
      layers: the layers whose GEMMs are measured; empty if `sizes` are given.
      sizes: sizes of the one GEMM that is measured instead, with their names in `workloads.gemm`; otherwise None.
      scaled_down: whether the layer was made smaller because there is no GPU.
      ops: the ops that are measured, from OPS; "gather" is the forward product with x in token order.
      peers: names of the peers that are measured too.
      time_limit: seconds after which no measurement begins, if no option names layers or sizes; else None.
    """

    layers: tuple[Layer, ...]
    sizes: dict[str, int] | None
    scaled_down: bool
    ops: tuple[str, ...]
    peers: tuple[str, ...]
    groups: str
    w_layout: str
    dtype: str
    implementation: str | None
    seed: int
    out: str
    quiet: bool
    time_limit: float | None

    @classmethod
    def from_args(cls, args, known: Mapping[str, Peer] = PEERS) -> Self:
        """Checks the options, and fills in what depends on the machine.

        Raises: UsageError: options that do not fit together or do not fit this machine.
        """
        sizes = options.sizes(args)
        layers = () if sizes else options.layers(args)
        is_first_look = not (sizes or args.layer or args.shapes)
        if is_first_look:
            layers = layers[:1]
        scaled_down = is_first_look and options.are_scaled_down(args)
        options.check_implementation(args.implementation)
        options.check_layout(args)
        dtype = args.dtype or options.default_dtype()
        ops = _names("--op", args.op.replace("fwd", "forward"), OPS)
        return cls(
            layers=tuple(map(options.scaled_down, layers)) if scaled_down else layers,
            sizes=sizes,
            scaled_down=scaled_down,
            ops=tuple(op for op in ops if not (op == "dw" and dtype == FP8)),  # dW's operands are not quantized
            peers=_peers(args.peers, known, dtype),
            dtype=dtype,
            time_limit=TIME_LIMIT if is_first_look else None,
            **{name: getattr(args, name) for name in ("groups", "w_layout", "implementation", "seed", "out", "quiet")},
        )

    def problems(self, op: str) -> dict[tuple[str, str], GroupedGemmProblem]:
        """Returns the problems to measure for an op, by the names of layer and GEMM."""
        how = {"dtype": self.dtype, "w_layout": self.w_layout, "permute_x": op == "gather"}
        if self.sizes:
            return {("own", "gemm"): gemm(**self.sizes, **how)}
        return {(layer.name, name): problem for layer in self.layers for name, problem in layer.gemms(**how).items()}


def _peers(text, known, dtype):
    """Returns the names in a comma list; "all" stands for every peer that is measured in this dtype."""
    if text == "none":
        return ()
    if text == "all":
        return tuple(name for name, peer in known.items() if dtype in peer.dtypes)
    found = _names("--peers", text, known)
    for name in found:
        if dtype not in known[name].dtypes:
            raise UsageError(f"--peers {name} is measured in {' and '.join(known[name].dtypes)}, got --dtype {dtype}")
    return found


def _names(option, text, known):
    """Returns the names in a comma list; the error for an unknown name also says which other programs measure more."""
    try:
        return options.names(option, text, known)
    except UsageError as error:
        raise UsageError(f"{error}; {_ELSEWHERE}") from None
