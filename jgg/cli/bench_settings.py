"""The options of `jgg bench`, checked and completed by what depends on the machine."""

import dataclasses
from collections.abc import Mapping
from typing import Self

from jgg.cli import options
from jgg.cli.options import UsageError
from jgg.core.problem import GroupedGemmProblem
from jgg.measuring.peers import PEERS, Peer
from jgg.measuring.workloads import FP8, Layer, gemm

OPS = ("forward", "dx", "dw", "gather")
_ELSEWHERE = (
    "in a checkout of jgg, python -m benchmarks.layers measures whole layers, and python -m benchmarks.gemms other"
    " libraries too"
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of `jgg bench`, as the JSON file has them too.

    Attributes:
      layers: whose GEMMs are measured.
      sizes: of the one GEMM that is measured instead, as `workloads.gemm` names them.
      scaled_down: the layers were made smaller because there is no GPU.
      ops: of OPS; "gather" is the forward product of x in token order.
      peers: names of those that are measured too.
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

    @classmethod
    def from_args(cls, args, known: Mapping[str, Peer] = PEERS) -> Self:
        """Checks the options, and fills in what depends on the machine.

        Raises: UsageError: options that do not fit together or do not fit this machine.
        """
        sizes = options.sizes(args)
        layers = () if sizes else options.layers(args)
        scaled_down = not sizes and options.are_scaled_down(args)
        options.check_implementation(args.implementation)
        options.check_layout(args)
        dtype = args.dtype or options.default_dtype()
        ops = _names("--op", args.op.replace("fwd", "forward"), OPS)
        return cls(
            layers=tuple(map(options.scaled_down, layers[:2])) if scaled_down else layers,
            sizes=sizes,
            scaled_down=scaled_down,
            ops=tuple(op for op in ops if not (op == "dw" and dtype == FP8)),  # dW is made of what is not quantized
            peers=_peers(args.peers, known, dtype),
            dtype=dtype,
            **{name: getattr(args, name) for name in ("groups", "w_layout", "implementation", "seed", "out", "quiet")},
        )

    def problems(self, op: str) -> dict[tuple[str, str], GroupedGemmProblem]:
        """What is to be measured, by the names of layer and GEMM."""
        how = {"dtype": self.dtype, "w_layout": self.w_layout, "permute_x": op == "gather"}
        if self.sizes:
            return {("own", "gemm"): gemm(**self.sizes, **how)}
        return {(layer.name, name): problem for layer in self.layers for name, problem in layer.gemms(**how).items()}


def _peers(text, known, dtype):
    """The names in a comma list; "all" are those that are measured for the dtype."""
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
    """The names in a comma list; an error says where more of them are known."""
    try:
        return options.names(option, text, known)
    except UsageError as error:
        raise UsageError(f"{error}; {_ELSEWHERE}") from None
