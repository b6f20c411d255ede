"""The options of `jgg finetune` and `jgg train`, and those that they share with other commands."""

import dataclasses
import functools
import math
from pathlib import Path

from jgg.cli.arguments import named_folder, number, path, positive_float, positive_int, seed, whole
from jgg.cli.declarations import REQUIRED, Options, changed, flag, option
from jgg.core.choices import (
    ALL_TARGETS,
    CACHE_DTYPES,
    EXCHANGES,
    EXPERTS,
    FSDP_SPLITS,
    OF_GATES,
    OF_MOE,
    REMAT,
    TARGETS,
    TRACKERS,
)

OPTIMIZERS = "adamw", "muon"
OPTIMIZER_STATES = "float32", "8bit"
_LARGEST_RANK = 2**16  # a rank above the sizes of a matrix adds nothing, and no model's are larger
_not_negative = number("0 or more and finite", lambda value: 0 <= value < math.inf)
_model, _data, _training = (functools.partial(option, group) for group in ("model", "data", "training"))
_lora, _devices, _output = (functools.partial(option, group) for group in ("LoRA", "devices", "output"))
_free = functools.partial(_output, may_change=True)

# a table: the meaning of each option, then its type, its default and the rest
# fmt: off


@dataclasses.dataclass(kw_only=True)
class Model(Options):
    """What a command starts from, and --config."""

    extra = "train"

    model: str = _model(
        "the model's folder, with config.json, safetensors files and tokenizer.json, or its name on the Hub",
        default=REQUIRED, metavar="MODEL", is_place=True, is_read=True)
    config: str | None = _model("TOML file of options: a key is an option's name without its dashes", metavar="FILE",
        is_read=True, is_noted=False)


@dataclasses.dataclass(kw_only=True)
class Experts(Model):
    """How experts are loaded, by the names of `jgg.models.loading.EXPERTS_BY_NAME`."""

    experts: str = _model("as-stored: experts in MXFP4 or FP8 stay so; fp8: they are quantized and multiplied so;"
        " mxfp4: they are quantized to 4 bits", default="bfloat16", choices=EXPERTS)


@dataclasses.dataclass(kw_only=True)
class Caches(Options):
    """How keys and values are kept while a model generates."""

    cache_dtype: str | None = _model("cached keys and values in FP8: half the memory, but rounded",
        choices=CACHE_DTYPES, shown="as the computation")


@dataclasses.dataclass(kw_only=True)
class Data(Model):
    """What is learned, and what is measured."""

    config: str | None = changed(Model, "config",
        what="TOML file of options, such as the run.toml of a run: a key is an option's name without its dashes")
    data: list[Path] = _data("JSONL or parquet files, or folders of Hugging Face datasets, to learn from", path,
        REQUIRED, nargs="+", metavar="FILE", is_read=True, may_change=True)
    mix: list[float] | None = _data("share of each file of --data in the learned tokens",
        positive_float, nargs="+", metavar="SHARE", shown="each row once in an epoch")
    sequence_length: int = _data("tokens per sequence", positive_int, 2048, metavar="N")
    split: bool = flag("data", "divide examples longer than a sequence instead of cutting them")
    skip_unmarked: bool = flag("data",
        "skip and count conversations that the chat template rejects or cannot mark, rather than stop at the first",
        may_change=True)
    packing: bool = flag("data", "put several examples in a sequence, each attending only to itself", default=True)
    eval_data: list[Path] | None = _data(
        "examples that are not learned, in the same form: their loss and perplexity are measured as training goes on",
        path, nargs="+", metavar="FILE", is_read=True, may_change=True)
    eval_every: int = _data("steps between two measurements of --eval-data; the last step is measured too",
        positive_int, 200, metavar="N", may_change=True)


@dataclasses.dataclass(kw_only=True)
class Batch(Options):
    """What a step learns."""

    batch_size: int | None = _training("sequences per batch, over all devices together", positive_int,
        metavar="N", shown="4, or one for each device")
    accumulate: int = _training("batches accumulated per optimizer step", positive_int, 1, metavar="N")


@dataclasses.dataclass(kw_only=True)
class Learning(Options):
    """How it is learned."""

    epochs: float = _training("length of the run in epochs", positive_float, 1.0, metavar="EPOCHS",
        alternative="length", may_change=True)
    steps: int | None = _training("length of the run in optimizer steps, instead of --epochs", positive_int,
        metavar="N", alternative="length", may_change=True)
    optimizer: str = _training("muon: the matrices of layers by Muon, all else by AdamW", default="adamw",
        choices=OPTIMIZERS)
    optimizer_states: str = _training("8bit: the moments of large parameters take a quarter of the memory, rounded",
        default="float32", choices=OPTIMIZER_STATES)
    optimizer_in_backward: bool = flag("training", "update each layer in the backward pass, which needs memory for the"
        " gradients of one layer, not of all; needs --remat all or offload, one device, --accumulate 1")
    learning_rate: float | None = _training("the highest rate, after the warm-up; it falls to 0 along a cosine",
        positive_float, metavar="RATE", shown="1e-3")
    warmup: int | None = _training("steps over which the rate rises", positive_int, metavar="STEPS",
        shown="a twentieth of the steps")
    weight_decay: float = _training("decoupled weight decay, applied to matrices only", _not_negative, 0.1,
        metavar="RATE")
    remat: str = _training("which results the backward pass recomputes, see jgg.models.Decoder", default="none",
        choices=REMAT, may_change=True)
    seed: int = _training("seed for initialization and data order", seed, 0, metavar="SEED")


@dataclasses.dataclass(kw_only=True)
class Training(Learning, Batch):
    """Both."""


@dataclasses.dataclass(kw_only=True)
class Mesh(Options):
    """Over how many devices a model is split."""

    fsdp: int | None = _devices("devices that store matrices split", positive_int, metavar="N",
        shown="all devices / --expert", may_change=True)
    fsdp_splits: str = _devices(
        "what of the experts each device along --fsdp stores: some experts whole, or some features of all, for fewer"
        " experts than devices", default=FSDP_SPLITS[0], choices=FSDP_SPLITS, may_change=True)
    expert: int = _devices("devices that share the experts; --fsdp times --expert is the number of all devices",
        positive_int, 1, metavar="N", may_change=True)
    exchange: str = _devices("how tokens reach the devices of their experts, see docs/scaling.md", default=EXCHANGES[0],
        choices=EXCHANGES, may_change=True)
    buffer_factor: float | None = _devices(
        "buffer size per device, as a multiple of an even share of the routed tokens; rows beyond it are dropped",
        positive_float, metavar="X", shown="room for all rows")


@dataclasses.dataclass(kw_only=True)
class Devices(Mesh):
    """Over how many devices and processes a model is split."""

    coordinator: str | None = _devices(
        "address of process 0, HOST:PORT, where several processes train together; auto: Slurm, Kubernetes or another"
        " environment that JAX knows says who takes part", metavar="ADDRESS", is_noted=False)
    processes: int | None = _devices("number of processes, with --coordinator", positive_int, metavar="N",
        is_noted=False)
    process: int | None = _devices("number of this process, from 0, with --coordinator", seed, metavar="I",
        is_noted=False)


@dataclasses.dataclass(kw_only=True)
class Output(Options):
    """What a run writes."""

    output: Path = _free("the folder of the new model", named_folder, REQUIRED, metavar="FOLDER")
    log_every: int = _free("steps between two lines of the log", positive_int, 10, metavar="N")
    log_to: list[str] | None = _free(
        "where to log in addition to OUTPUT.jsonl; wandb: Weights & Biases, set up by its own environment variables",
        choices=tuple(TRACKERS), nargs="+")
    checkpoints: Path | None = _free(
        "a folder for the training state; run the same command again to resume from it", path,
        metavar="FOLDER")
    save_every: int = _free("steps between two checkpoints", positive_int, 200, metavar="N")
    quiet: bool = flag("output", "print only errors", is_noted=False)


@dataclasses.dataclass(kw_only=True)
class Lora(Options):
    """Adapters."""

    lora_rank: int = _lora("of adapters", whole(1, _LARGEST_RANK), 16, metavar="N")
    lora_alpha: float = _lora("adapters are scaled by alpha / rank", positive_float, 32.0, metavar="ALPHA")
    targets: tuple[str, ...] = _lora(f"matrices with adapters, of {', '.join(ALL_TARGETS)}", default=TARGETS, nargs="+",
        choices=ALL_TARGETS, metavar="NAME", shown=f"all but the last {len((*OF_GATES, *OF_MOE))}")


# A command's options stand in the order from the last class to the first.
@dataclasses.dataclass(kw_only=True)
class Finetune(Output, Devices, Lora, Training, Data, Experts):
    """Fine-tune a model of a Hugging Face folder: LoRA adapters that PEFT loads, or with --full all of it."""

    example = "jgg finetune openai/gpt-oss-20b --data train.jsonl --output adapter --experts as-stored --remat all"
    page = "fine-tune/"
    module = "jgg.cli.training.finetune"

    output: Path = changed(Output, "output", what="the adapter's folder, or with --full the folder of the new model")
    full: bool = flag("training", "train all parameters instead of adapters")
    learning_rate: float | None = changed(Training, "learning_rate", shown="2e-4, with --full 1e-5")
    weight_decay: float = changed(Training, "weight_decay", default=0.0)
    remat: str = changed(Training, "remat", default="names")
    plan: bool = flag("training", "print how much memory a step needs, and train nothing: it compiles the step, and if"
        " that does not fit, another one for each option that may help", is_noted=False)


@dataclasses.dataclass(kw_only=True)
class Train(Output, Devices, Training, Data):
    """Train a new model, as a config.json describes it, and save it as a Hugging Face folder."""

    example = "jgg train config.json --tokenizer tokenizer --data train.parquet --output new"
    page = "train/"
    module = "jgg.cli.training.new"

    model: str = changed(Model, "model", metavar="CONFIG",
        what="a folder with the new model's config.json, or that file")
    tokenizer: Path | None = _model("folder with tokenizer.json and what belongs to it", path, metavar="FOLDER",
        shown="the folder of config.json", is_read=True)
    dtype: str | None = _model("dtype of the computation; parameters are float32",
        choices=("float32", "bfloat16"), shown="bfloat16 on a GPU, else float32")
    fp8: bool = flag("model", "multiply by the experts' weights in FP8")
    split: bool = changed(Data, "split", default=True)
    plan: bool = changed(Finetune, "plan")
