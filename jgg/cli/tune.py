"""Find fast kernel configurations for this GPU and keep them in a file that jgg reads.

Without sizes it tunes the layers that jgg knows. Interrupted, it keeps what it found.
"""

import os

from jgg.cli.common import UsageError, import_with_extra, positive_int
from jgg.measuring.workloads import OPS, gemm, load_layers
from jgg.problem import DTYPES, W_LAYOUTS
from jgg.target import device_target
from jgg.tuning import output_file

_SIZES = {
    "m": ("num_rows", "routed rows, tokens times experts of each"),
    "k": ("in_features", "features of x"),
    "n": ("out_features", "features of y"),
    "experts": ("num_experts", "experts on one device"),
}
_FLAGS = {
    "permute_x": "x is in token order",
    "permute_y": "y is in token order",
    "weighted": "rows are scaled by top-k weights",
    "biased": "with a bias",
}
# how layers use their products: rows in expert order, or gathered and scattered
_LAYER_OPTIONS = {
    "up": ({}, {"permute_x": True}),
    "down": ({}, {"permute_y": True, "weighted": True}),
}


def add_arguments(parser):
    """Declares the options of `jgg tune`."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--layer", action="append", metavar="NAME", help="a layer that jgg knows; may be repeated")
    what.add_argument("--shapes", metavar="FILE", help="JSON file of layers, as jgg/layers.json")
    for name, (_, meaning) in _SIZES.items():
        parser.add_argument(f"--{name}", type=positive_int, help=f"of a single product: {meaning}")
    parser.add_argument("--topk", type=positive_int, default=1, help="of a single product: experts of a token")
    for name, meaning in _FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=f"of a single product: {meaning}")
    parser.add_argument("--op", default=",".join(OPS), help="comma-separated (%(default)s)")
    parser.add_argument("--dtype", choices=[dtype.__name__ for dtype in DTYPES], default="bfloat16")
    parser.add_argument("--w-layout", choices=W_LAYOUTS, help="by default both")
    parser.add_argument("--out", metavar="FILE", help="to write to ($JGG_TUNED, else a file in the folder for caches)")
    parser.add_argument("--workers", type=positive_int, help="processes that compile; they take turns on the GPU (8)")
    parser.add_argument("--interpret", action="store_true", help="try the search without a GPU, on sizes that are tiny")


def run(args) -> int:
    """Tunes each product and op; returns 0, or 1 where for some no configuration works."""
    # the processes share the GPU's memory
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    problems, ops = _problems(args), _ops(args.op)
    if args.interpret and not args.out:
        raise UsageError("--interpret needs --out: what it writes serves no GPU")
    if not args.interpret and device_target() is None:
        raise UsageError("jgg tune needs a GPU that JAX can use (see jgg info); --interpret tries the search without")
    try:
        out = output_file(args.out)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    tune_run = import_with_extra("jgg.cli.tune_run", "bench")
    searches = [tune_run.Search(name, op, problem) for name, problem in problems for op in ops]
    workers = args.workers or min(8, os.cpu_count() or 1, len(searches))
    return tune_run.run_all(searches, out, "interpret" if args.interpret else "triton", workers)


def _problems(args):
    """(name, problem) of each product to tune."""
    sizes = {field: getattr(args, name) for name, (field, _) in _SIZES.items()}
    missing = [f"--{name}" for name, (field, _) in _SIZES.items() if sizes[field] is None]
    layouts = (args.w_layout,) if args.w_layout else W_LAYOUTS
    if len(missing) < len(_SIZES):
        if missing or args.layer or args.shapes:
            raise UsageError(f"a single product needs --{', --'.join(_SIZES)} and no layers, missing {missing}")
        if args.m % args.topk:
            raise UsageError(f"--m must be a multiple of --topk, {args.topk}, got {args.m}")
        options = sizes | {"topk": args.topk, "dtype": args.dtype} | {name: getattr(args, name) for name in _FLAGS}
        return [(f"{args.m}x{args.k}x{args.n}", gemm(w_layout=layout, **options)) for layout in layouts]
    problems = []
    for layer in _layers(args):
        for layout in layouts:
            for product, variants in _LAYER_OPTIONS.items():
                for options in variants:
                    problem = layer.gemms(dtype=args.dtype, w_layout=layout, **options)[product]
                    problems.append((f"{layer.name} {product}", problem))
    return problems


def _layers(args):
    try:
        layers = load_layers(args.shapes)
    except (OSError, ValueError) as error:
        raise UsageError(f"--shapes: {error}") from error
    unknown = set(args.layer or ()) - layers.keys()
    if unknown:
        raise UsageError(f"--layer must be one of {', '.join(layers)}, got {', '.join(sorted(unknown))}")
    return [layers[name] for name in args.layer or layers]


def _ops(text):
    ops = ["forward" if op == "fwd" else op for op in text.split(",")]
    unknown = [op for op in ops if op not in OPS]
    if unknown:
        raise UsageError(f"--op must be of {', '.join(OPS)}, got {', '.join(unknown)}")
    return ops
