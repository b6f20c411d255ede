"""Time grouped GEMMs here, check them, and compare them with other libraries.

Measures the products of well-known MoE layers or of your own sizes beside a dense product, a copy and the peers that
are installed; with --op layer whole layers, the memory that they take and their routing. Prints a table and writes
PREFIX.json and PREFIX.png.
"""

import dataclasses
import os
from typing import Self

import jax

from jgg.cli.common import INTERRUPTED, UsageError, check_implementation, check_out, import_with_extra, positive_int
from jgg.implementations import choice
from jgg.measuring.layer import LayerProblem
from jgg.measuring.peers import PEERS
from jgg.measuring.workloads import GROUPS, Layer, gemm, load_layers
from jgg.problem import W_LAYOUTS, GroupedGemmProblem

OPS = ("forward", "dx", "dw", "gather")
LAYER = "layer"
DTYPES = ("bfloat16", "float16", "float32")
_SIZES = {
    "m": "routed rows of one GEMM of your own",
    "k": "its in-features",
    "n": "its out-features",
    "experts": "its experts",
}


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
        has_gpu = jax.default_backend() == "gpu"
        sizes = _sizes(args)
        is_default = not (sizes or args.layer or args.shapes)
        peers = {"all": ",".join(PEERS), "none": ""}.get(args.peers, args.peers)
        settings = cls(
            layers=() if sizes else _default_layers(has_gpu) if is_default else _layers(args),
            sizes=sizes,
            scaled_down=is_default and not has_gpu,
            ops=_names("--op", args.op.replace("fwd", "forward"), (*OPS, LAYER)),
            peers=_names("--peers", peers, PEERS) if peers else (),
            dtype=args.dtype or ("bfloat16" if has_gpu else "float32"),
            **{name: getattr(args, name) for name in ("groups", "w_layout", "implementation", "seed", "out", "quiet")},
        )
        settings._check()
        return settings

    def _check(self):
        check_out(self.out)
        check_implementation(self.implementation)
        if self.sizes and LAYER in self.ops and self.sizes["out_features"] % 2:
            raise UsageError(f"--n must be even with --op layer: gate and up, got {self.sizes['out_features']}")

    @property
    def gemm_ops(self) -> tuple[str, ...]:
        """Those of a single product."""
        return tuple(op for op in self.ops if op != LAYER)

    @property
    def layer_problems(self) -> list[LayerProblem]:
        """The whole layers to be measured; that of sizes of one's own is the one whose up product has them."""
        if LAYER not in self.ops:
            return []
        layers = self.layers
        if self.sizes:
            topk, inner = self.sizes["topk"], self.sizes["out_features"] // 2
            tokens = self.sizes["num_rows"] // topk
            layers = [Layer("own", tokens, self.sizes["in_features"], inner, self.sizes["num_experts"], topk)]
        return [LayerProblem(layer, self.dtype, self.w_layout, self.implementation) for layer in layers]

    def problems(self, op: str) -> dict[tuple[str, str], GroupedGemmProblem]:
        """What is to be measured, by the names of layer and GEMM."""
        options = {"dtype": self.dtype, "w_layout": self.w_layout, "permute_x": op == "gather"}
        if self.sizes:
            return {("own", "gemm"): gemm(**self.sizes, **options)}
        return {
            (layer.name, name): problem for layer in self.layers for name, problem in layer.gemms(**options).items()
        }


def _sizes(args):
    """The sizes of one GEMM, or None where no option gives any."""
    given = [name for name in (*_SIZES, "topk") if getattr(args, name) is not None]
    if not given:
        return None
    for other in ("layer", "shapes"):
        if getattr(args, other):
            raise UsageError(f"--{given[0]} must be given without --{other}, got both")
    missing = [f"--{name}" for name in _SIZES if name not in given]
    if missing:
        together = "--m, --k, --n and --experts must be given together"
        raise UsageError(f"{together}, got --{given[0]} and no {', '.join(missing)}")
    topk = args.topk or 1
    if args.m % topk:
        raise UsageError(f"--m must be a multiple of --topk {topk}, got {args.m}")
    if topk > args.experts:
        raise UsageError(f"--topk must be at most --experts {args.experts}, got {topk}")
    return {
        "num_rows": args.m, "in_features": args.k, "out_features": args.n, "num_experts": args.experts, "topk": topk,
    }  # fmt: skip


def _layers(args):
    """The layers that are named, or all of a file."""
    if args.layer and args.shapes:
        raise UsageError("--layer must be given without --shapes, got both")
    if args.shapes:
        try:
            layers = tuple(load_layers(args.shapes).values())
        except (OSError, ValueError) as error:
            raise UsageError(f"--shapes must name a file of layers: {error}") from error
        if not layers:
            raise UsageError(f"--shapes must name a file of layers, got none in {args.shapes}")
        return layers
    known = load_layers()
    return tuple(known[name] for name in _names("--layer", ",".join(args.layer), known))


def _default_layers(has_gpu):
    """All known layers, or without a GPU small ones like the first two."""
    layers = tuple(load_layers().values())
    return layers if has_gpu else tuple(map(_scaled_down, layers[:2]))


def _scaled_down(layer):
    return dataclasses.replace(
        layer,
        tokens=min(256, layer.tokens),
        hidden=max(1, layer.hidden // 16),
        expert_intermediate=max(1, layer.expert_intermediate // 16),
        experts=min(16, layer.experts),
        topk=min(16, layer.topk),
    )


def _names(option, text, known):
    """The names in a comma list, each once; all must be known."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise UsageError(f"{option} must be of {', '.join(known)}; got {name!r}")
    return names


def add_arguments(parser):
    """Declares the options of `jgg bench`."""
    parser.add_argument("--layer", action="append", metavar="NAME", help="a known MoE layer; repeat for more (all)")
    parser.add_argument("--shapes", metavar="FILE", help="JSON file of layers, of the form of jgg/layers.json")
    for name, meaning in _SIZES.items():
        parser.add_argument(f"--{name}", type=positive_int, help=meaning)
    parser.add_argument("--topk", type=positive_int, help="its experts per token (1)")
    parser.add_argument(
        "--op",
        default=",".join(OPS),
        metavar="LIST",
        help="comma list; gather: x in token order; layer: whole layers, router included (%(default)s)",
    )
    parser.add_argument(
        "--peers", default="all", metavar="LIST", help=f"all, none or a comma list of {', '.join(PEERS)} (%(default)s)"
    )
    parser.add_argument(
        "--groups", choices=GROUPS, default="uneven", help="how rows are spread, but for layers (%(default)s)"
    )
    parser.add_argument("--w-layout", choices=W_LAYOUTS, default="enk", help="of the weights (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the operands (bfloat16 on a GPU, float32 elsewhere)")
    parser.add_argument(
        "--implementation",
        choices=choice.NAMES,
        help="of grouped GEMM (triton on a GPU of compute capability 8.0 or newer, xla elsewhere)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of operands and group sizes (%(default)s)")
    parser.add_argument("--out", default="jgg-bench", metavar="PREFIX", help="of the files written (%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args) -> int:
    """Measures and reports; returns 0, 1 after a wrong or failed product, or 130 after an interrupt."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers that use torch need memory too
    bench_run = import_with_extra("jgg.cli.bench_run", "bench")
    bench_report = import_with_extra("jgg.cli.bench_report", "bench")
    settings = Settings.from_args(args)

    result = bench_run.run(settings, keep=bench_report.write_json)
    if not (result.rows or result.layers):  # interrupted before anything was measured
        raise KeyboardInterrupt
    paths = bench_report.write(result)
    print(bench_report.text(result))
    print("Wrote " + " and ".join(map(str, paths)))
    if result.interrupted:
        return INTERRUPTED
    return 0 if result.is_right else 1
