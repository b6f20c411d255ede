"""The commands of `jgg`, and the options of those that need no extra but `demo`."""

import dataclasses
import functools

from jgg.cli.arguments import file, positive_float, positive_int, prefix, seed
from jgg.cli.declarations import Options, changed, option, switch
from jgg.cli.evaluation.options import Evaluate
from jgg.cli.generation.options import Generate
from jgg.cli.grpo.options import Grpo
from jgg.cli.training.options import Finetune, Train
from jgg.core.choices import DTYPE_NAMES, FP8, GROUPS, IMPLEMENTATIONS, OPS, W_LAYOUTS

_FIRST_LOOK = "the first, for 75 seconds, after which no measurement begins; without a GPU it is made smaller"
_product, _computing, _output = (functools.partial(option, group) for group in ("product", "computation", "output"))
_model, _training = (functools.partial(option, group) for group in ("model", "training"))

# a table: the meaning of each option, then its type, its default and the rest
# fmt: off


@dataclasses.dataclass(kw_only=True)
class Output(Options):
    """How a command prints."""

    json: bool = switch("output", "print JSON instead of text")


@dataclasses.dataclass(kw_only=True)
class Products(Output):
    """The products to measure: those of layers, or a single one of these sizes."""

    layer: list[str] | None = _product("a layer that jgg knows, by its name; may be repeated", action="append",
        metavar="NAME", shown="all of them")
    shapes: str | None = _product(
        "JSON file of your own layers, in the form of jgg/tuning/layers.json; --layer then names these", metavar="FILE",
        is_read=True)
    m: int | None = _product("rows of a single product, measured instead of layers: tokens times experts of each",
        positive_int)
    k: int | None = _product("features of x in the single product", positive_int)
    n: int | None = _product("features of y in the single product", positive_int)
    experts: int | None = _product("number of experts in the single product", positive_int)
    topk: int | None = _product("experts per token in the single product", positive_int, shown="1")
    op: str | None = _computing(
        "products to time, a comma list: forward, its gradients dx and dw, and gather, which is forward with x in token"
        " order", default=",".join(OPS), metavar="LIST")
    dtype: str | None = _computing("dtype of x and the weights; with fp8 both are quantized, and there is no dw",
        choices=(*DTYPE_NAMES, FP8), shown="bfloat16 on a GPU, else float32")
    w_layout: str | None = _computing("axes of the weights: e experts, n features of y, k features of x", default="enk",
        choices=W_LAYOUTS)


@dataclasses.dataclass(kw_only=True)
class Info(Output):
    """Show versions, devices, which implementation jgg uses here, and what to fix."""

    example = "jgg info"
    page = "command/#json-and-exit-codes"
    module = "jgg.cli.info"


@dataclasses.dataclass(kw_only=True)
class Demo(Options):
    """Train a small mixture-of-experts language model on this machine and plot its loss."""

    example = "jgg demo --steps 200 --save tiny"
    page = "command/#train-a-small-model"
    module = "jgg.cli.demo.run"
    extra = "demo"

    steps: int = _training("steps of training", positive_int, 600)
    batch: int = _training("windows of text per step", positive_int, 8)
    seq: int = _training("bytes to predict per window", positive_int, 128)
    hidden: int = _model("features of the model and of each expert, a multiple of 64", positive_int, 128)
    layers: int = _model("layers, each of attention and experts", positive_int, 3)
    experts: int = _model("experts per layer", positive_int, 8)
    topk: int = _model("experts per byte", positive_int, 2)
    fp8: bool = switch("model", "multiply by the experts' weights in FP8, see jgg.Fp8")
    dtype: str | None = _model("dtype of the computation; parameters are float32", choices=("float32", "bfloat16"),
        shown="bfloat16 on a GPU, else float32")
    implementation: str | None = _model("implementation of products", choices=IMPLEMENTATIONS,
        shown="triton on a GPU of compute capability 8.0 or newer, else xla")
    seed: int = _training("seed of weights, batches and the sample", seed, 0)
    temperature: float = _output("sampling temperature of the text sample", positive_float, 0.7)
    save: str | None = _output(
        "save the model and its tokenizer in a new folder, which jgg.models.load and Hugging Face transformers read",
        metavar="FOLDER")
    out: str = _output("names of the written files, PREFIX.png and PREFIX.json", prefix, "jgg-demo", metavar="PREFIX")
    quiet: bool = switch("output", "print only the result")


@dataclasses.dataclass(kw_only=True)
class Bench(Products):
    """Time grouped GEMMs on this machine against a dense product and jax.lax.ragged_dot, and check every result."""

    example = "jgg bench --layer qwen3-30b-a3b --dtype fp8"
    page = "command/#measure"
    module = "jgg.cli.bench"

    layer: list[str] | None = changed(Products, "layer", shown=_FIRST_LOOK,
        what="a layer that jgg knows, by its name, or all of them by the name all; may be repeated")
    groups: str = _computing("how the rows are spread over the experts; one: the first has all rows", default="uneven",
        choices=GROUPS)
    implementation: str | None = changed(Demo, "implementation", group="computation")
    seed: int = _computing("seed of the random data", seed, 0)
    quiet: bool = switch("output", "show no progress")


@dataclasses.dataclass(kw_only=True)
class Tune(Products):
    """Find fast kernel configurations for this GPU and keep them in a file that jgg reads."""

    example = "jgg tune --m 65536 --k 2048 --n 1536 --experts 128 --topk 8"
    page = "command/#tune"
    module = "jgg.cli.tune"

    permute_x: bool = switch("product", "x is in token order in the single product")
    permute_y: bool = switch("product", "y is in token order in the single product")
    weighted: bool = switch("product", "rows are scaled by top-k weights in the single product")
    biased: bool = switch("product", "the experts have a bias in the single product")
    op: str | None = changed(Products, "op", default=None, what="products to tune, a comma list",
        shown=f"{','.join(OPS)}; in fp8 only forward, since dx is the same product with transposed weights")
    dtype: str | None = changed(Products, "dtype", default="bfloat16",
        what="dtype of x and the weights; fp8: both are quantized", shown=None)
    w_layout: str | None = changed(Products, "w_layout", default=None, shown="both")
    workers: int | None = _computing("number of processes that compile; they take turns on the GPU", positive_int,
        shown="8")
    interpret: bool = switch("computation",
        "run the search in Triton's interpreter, without a GPU: to try it, on tiny sizes")
    out: str | None = _output("file to write to", file, metavar="FILE",
        shown="the file that $JGG_TUNED names, else one in the folder for caches")


# fmt: on
_CLASSES: tuple[type[Options], ...] = (Info, Demo, Bench, Evaluate, Finetune, Generate, Grpo, Train, Tune)
COMMANDS = {options.__name__.lower(): options for options in _CLASSES}
