"""Find fast kernel configurations for this GPU and keep them in a file that jgg reads.

Without sizes it tunes the layers that jgg knows. Interrupted, it keeps what it found.
"""

import os

from jgg.cli import options, tune_run
from jgg.cli.options import UsageError, positive_int
from jgg.gpu_target import device_target
from jgg.measuring.workloads import OPS, gemm
from jgg.problem import W_LAYOUTS
from jgg.tuning import output_file

_FLAGS = {
    "permute_x": "x is in token order",
    "permute_y": "y is in token order",
    "weighted": "rows are scaled by top-k weights",
    "biased": "with a bias",
}
# how layers use their products: rows in expert order, or gathered and scattered
_LAYER_OPTIONS: dict[str, tuple[dict[str, bool], ...]] = {
    "up": ({}, {"permute_x": True}),
    "down": ({}, {"permute_y": True, "weighted": True}),
}


def add_arguments(parser):
    """Declares the options of `jgg tune`."""
    options.add_shared(parser, *options.PRODUCTS)
    for name, meaning in _FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=f"of a single product: {meaning}")
    parser.add_argument("--op", default=",".join(OPS), help="comma-separated (%(default)s)")
    parser.add_argument("--out", metavar="FILE", help="to write to ($JGG_TUNED, else a file in the folder for caches)")
    parser.add_argument("--workers", type=positive_int, help="processes that compile; they take turns on the GPU (8)")
    parser.add_argument("--interpret", action="store_true", help="try the search without a GPU, on sizes that are tiny")
    dtype = {"default": "bfloat16", "help": "of the operands (%(default)s)"}
    options.add_shared(parser, dtype=dtype, w_layout={"help": "of the weights (both)"})


def run(args) -> int:
    """Tunes each product and op; returns 0, or 1 where for some no configuration works."""
    # the processes share the GPU's memory
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    problems, ops = _problems(args), options.names("--op", args.op.replace("fwd", "forward"), OPS)
    if args.interpret and not args.out:
        raise UsageError("--interpret needs --out: what it writes serves no GPU")
    if not args.interpret and device_target() is None:
        raise UsageError("jgg tune needs a GPU that JAX can use (see jgg info); --interpret tries the search without")
    try:
        out = output_file(args.out)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    searches = [tune_run.Search(name, op, problem) for name, problem in problems for op in ops]
    workers = args.workers or min(8, os.cpu_count() or 1, len(searches))
    return tune_run.run_all(searches, out, "interpret" if args.interpret else "triton", workers)


def _problems(args):
    """(name, problem) of each product to tune."""
    layouts = (args.w_layout,) if args.w_layout else W_LAYOUTS
    sizes = options.sizes(args)
    if sizes:
        flags = {name: getattr(args, name) for name in _FLAGS}
        name = f"{args.m}x{args.k}x{args.n}"
        return [(name, gemm(w_layout=layout, dtype=args.dtype, **sizes, **flags)) for layout in layouts]
    return [
        (f"{layer.name} {product}", layer.gemms(dtype=args.dtype, w_layout=layout, **variant)[product])
        for layer in options.layers(args)
        for layout in layouts
        for product, variants in _LAYER_OPTIONS.items()
        for variant in variants
    ]
