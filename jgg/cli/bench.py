"""Time grouped GEMMs here, check them, and compare them with other libraries.

Measures the products of well-known MoE layers or of your own sizes beside a dense product, a copy and the peers that
are installed; with --op layer whole layers, the memory that they take and their routing. Prints a table and writes
PREFIX.json and PREFIX.png.
"""

import dataclasses
import os
from pathlib import Path
from typing import Self

from jgg.cli import options
from jgg.cli.options import INTERRUPTED, UsageError
from jgg.cli.output import Output
from jgg.core.files import replace_text
from jgg.core.problem import GroupedGemmProblem
from jgg.fp8 import Fp8
from jgg.measuring.layer import LayerProblem
from jgg.measuring.peers import PEERS
from jgg.measuring.workloads import Layer, gemm

OPS = ("forward", "dx", "dw", "gather")
LAYER = "layer"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of `jgg bench`, as the JSON file has them too.

    Attributes:
      layers: whose GEMMs are measured.
      sizes: of the one GEMM that is measured instead, as `workloads.gemm` names them.
      scaled_down: the layers were made smaller because there is no GPU.
      ops: of OPS and LAYER; "gather" is the forward product of x in token order.
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
    def from_args(cls, args) -> Self:
        """Checks the options, and fills in what depends on the machine.

        Raises: UsageError: options that do not fit together or do not fit this machine.
        """
        sizes = options.sizes(args)
        layers = () if sizes else options.layers(args)
        scaled_down = not sizes and options.are_scaled_down(args)
        ops = options.names("--op", args.op.replace("fwd", "forward"), (*OPS, LAYER))
        peers = {"all": ",".join(PEERS), "none": ""}.get(args.peers, args.peers)
        options.check_implementation(args.implementation)
        if sizes and LAYER in ops and sizes["out_features"] % 2:
            raise UsageError(f"--n must be even with --op layer: gate and up, got {sizes['out_features']}")
        return cls(
            layers=tuple(map(options.scaled_down, layers[:2])) if scaled_down else layers,
            sizes=sizes,
            scaled_down=scaled_down,
            ops=ops,
            peers=options.names("--peers", peers, PEERS) if peers else (),
            dtype=args.dtype or options.default_dtype(),
            **{name: getattr(args, name) for name in ("groups", "w_layout", "implementation", "seed", "out", "quiet")},
        )

    @property
    def gemm_ops(self) -> tuple[str, ...]:
        """Those of a single product; dW has none in FP8."""
        return tuple(op for op in self.ops if op != LAYER and not (self.is_fp8 and op == "dw"))

    @property
    def is_fp8(self) -> bool:
        """Whether products are made in FP8."""
        return self.dtype == options.FP8

    @property
    def array_dtype(self) -> str:
        """Of what is quantized, or multiplied."""
        return "bfloat16" if self.is_fp8 else self.dtype

    @property
    def layer_problems(self) -> list[LayerProblem]:
        """The whole layers to be measured; that of sizes of one's own is the one whose up product has them."""
        if LAYER not in self.ops:
            return []
        layers = self.layers
        if self.sizes:
            topk, inner = self.sizes["topk"], self.sizes["out_features"] // 2
            tokens = self.sizes["num_rows"] // topk
            layers = (Layer("own", tokens, self.sizes["in_features"], inner, self.sizes["num_experts"], topk),)
        recipe = Fp8() if self.is_fp8 else None
        return [LayerProblem(layer, self.array_dtype, self.w_layout, self.implementation, recipe) for layer in layers]

    def problems(self, op: str) -> dict[tuple[str, str], GroupedGemmProblem]:
        """What is to be measured, by the names of layer and GEMM."""
        how = {"dtype": self.array_dtype, "w_layout": self.w_layout, "permute_x": op == "gather"}
        if self.sizes:
            return {("own", "gemm"): gemm(**self.sizes, **how)}
        return {(layer.name, name): problem for layer in self.layers for name, problem in layer.gemms(**how).items()}


def run(args) -> int:
    """Measures and reports; returns 0, 1 after a wrong or failed product or file, or 130 after an interrupt."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers that use torch need memory too
    plots = options.import_with_extra("jgg.cli.plots", "bench")
    from jgg.cli import bench_report, bench_run

    output, picture, numbers = Output(), Path(f"{args.out}.png"), Path(f"{args.out}.json")

    def keep(result):
        text = bench_report.as_json(result)
        output.write(numbers, lambda path: replace_text(path, text))
        return text

    result = bench_run.run(Settings.from_args(args), keep)
    if not (result.rows or result.layers):  # interrupted before anything was measured
        raise KeyboardInterrupt
    text = keep(result)
    output.write(picture, lambda path: plots.write_bench(result, path))
    if args.json:
        print(text, end="")
    else:
        bench_report.show(result)
    failed = output.report(quiet=args.json)
    if result.interrupted:
        return INTERRUPTED
    return 0 if result.is_right and not failed else 1
