"""Options that the commands which train have: data, length of a run, logs, checkpoints, devices."""

import argparse
from pathlib import Path

from _jgg_command.arguments import Parser, number, positive_float, positive_int, seed
from _jgg_command.configuration import add_config

REMAT = ("none", "attention", "names", "all")
FSDP_SPLITS = ("experts", "features")
EXCHANGES = ("all_gather", "ragged_all_to_all")
OPTIMIZERS = ("adamw", "muon")
TRACKERS = ("tensorboard", "wandb")
_not_negative = number("0 or more and finite", lambda value: 0 <= value < float("inf"))


def add_model(parser: Parser, metavar: str, what: str) -> None:
    """Declares what a command starts from, `model`, and --data and --config."""
    # without a type, which would turn the default into a path
    parser.add_argument("model", metavar=metavar, nargs="?", default=argparse.SUPPRESS, help=what)
    add_config(parser, "model", "data", "output", such_as=", such as the run.toml of a run")
    what = "JSONL or parquet files, or folders of Hugging Face datasets, to learn from"
    parser.add_argument("--data", type=Path, nargs="+", metavar="FILE", help=what)


def add_training(parser: Parser, *, learning_rate: str, weight_decay: float, remat: str, split: bool) -> None:
    """Declares what all training has, with defaults of the command's own."""
    what = "shares of the files of --data in what is learned, counted in tokens (default: each once in an epoch)"
    parser.add_argument("--mix", type=positive_float, nargs="+", metavar="SHARE", help=what)
    _add(parser, "sequence-length", 2048, "tokens of a sequence")
    _add_flag(parser, "split", split, "examples that are longer than a sequence are divided rather than cut")
    add_skip_unmarked(parser)
    _add_flag(parser, "packing", True, "several examples in a sequence, each attending to itself alone")
    what = "sequences that are computed at once, on all devices together (default: 4, or one for each device)"
    parser.add_argument("--batch-size", type=positive_int, metavar="N", help=what)
    _add(parser, "accumulate", 1, "such batches in a step")
    parser.add_argument("--epochs", type=positive_float, default=1.0, help="length of the run (default: %(default)s)")
    parser.alternatives = (("epochs", "steps"),)
    parser.add_argument("--steps", type=positive_int, metavar="N", help="length of the run, in the place of --epochs")
    what = "muon: the matrices of layers by Muon, all else by AdamW (default: %(default)s)"
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help=what)
    what = f"the highest rate, after the warm-up; it falls to 0 along a cosine (default: {learning_rate})"
    parser.add_argument("--learning-rate", type=positive_float, metavar="RATE", help=what)
    what = "steps in which the rate rises (default: a twentieth of all)"
    parser.add_argument("--warmup", type=positive_int, metavar="STEPS", help=what)
    what = "of matrices, beside the update (default: %(default)s)"
    parser.add_argument("--weight-decay", type=_not_negative, default=weight_decay, metavar="RATE", help=what)
    what = "which results the backward pass computes again, see jgg.models.Decoder (default: %(default)s)"
    parser.add_argument("--remat", choices=REMAT, default=remat, help=what)
    parser.add_argument(
        "--seed", type=seed, default=0, help="of new parameters and of the order (default: %(default)s)"
    )
    _add_measuring(parser)
    add_devices(parser)


def _add_measuring(parser: Parser) -> None:
    what = "examples that are not learned, in the same form: their loss and perplexity are measured as training goes on"
    parser.add_argument("--eval-data", type=Path, nargs="+", metavar="FILE", help=what)
    _add(parser, "eval-every", 200, "steps between two measurements of --eval-data; the last step is measured too")
    _add(parser, "log-every", 10, "steps between two lines of the log")
    what = "where the log goes beside OUTPUT.jsonl; wandb: Weights & Biases, by its own environment variables"
    parser.add_argument("--log-to", choices=TRACKERS, nargs="+", help=what)
    what = "a folder to save the state of training in; the same command run again goes on from there"
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help=what)
    _add(parser, "save-every", 200, "steps between two checkpoints")
    _add_flag(parser, "quiet", False, "print only errors")


def add_devices(parser: Parser) -> None:
    """Declares over how many devices and processes a model is split."""
    what = "devices that store matrices split (default: all devices / --expert)"
    parser.add_argument("--fsdp", type=positive_int, metavar="N", help=what)
    what = (
        "what of the experts each device along --fsdp stores: some experts whole, or some features of all, for fewer"
        " experts than devices (default: %(default)s)"
    )
    parser.add_argument("--fsdp-splits", choices=FSDP_SPLITS, default=FSDP_SPLITS[0], help=what)
    _add(parser, "expert", 1, "devices that share the experts; --fsdp times --expert is the number of all devices")
    what = "how tokens reach the devices of their experts, see docs/scaling.md (default: %(default)s)"
    parser.add_argument("--exchange", choices=EXCHANGES, default=EXCHANGES[0], help=what)
    what = "room of each device for rows, in shares of an even distribution; rows beyond it are dropped (default: all)"
    parser.add_argument("--buffer-factor", type=positive_float, metavar="X", help=what)
    what = (
        "address of process 0, HOST:PORT, where several processes train together; auto: Slurm, Kubernetes or another"
        " environment that JAX knows says who takes part"
    )
    parser.add_argument("--coordinator", metavar="ADDRESS", help=what)
    parser.add_argument("--processes", type=positive_int, metavar="N", help="number of processes, with --coordinator")
    parser.add_argument("--process", type=seed, metavar="I", help="number of this process, from 0, with --coordinator")


def add_skip_unmarked(parser: Parser) -> None:
    """Declares what happens to conversations whose answers cannot be told apart."""
    what = "skip and count conversations that the chat template rejects or cannot mark, rather than stop at the first"
    _add_flag(parser, "skip-unmarked", False, what)


def _add(parser: Parser, name: str, default: int, what: str) -> None:
    what = f"{what} (default: %(default)s)"
    parser.add_argument(f"--{name}", type=positive_int, default=default, metavar="N", help=what)


def _add_flag(parser: Parser, name: str, default: bool, what: str) -> None:
    kind = argparse.BooleanOptionalAction
    parser.add_argument(f"--{name}", action=kind, default=default, help=f"{what} (default: %(default)s)")
