"""The options of finetune.py, and what can be said of them before anything is loaded."""

import argparse
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from arguments import Parser, positive, whole
from folders import read_json

import jgg

EXPERTS = {"bfloat16": "dense", "as-stored": "as stored", "fp8": jgg.Fp8()}
TARGETS = ("w_q", "w_k", "w_v", "w_o", "w_gate_up", "w_down", "w_dense_gate_up", "w_dense_down")
FURTHER_TARGETS = ("w_shared_gate_up", "w_shared_down", "w_router")
# what a run that goes on from a checkpoint may change
FREE = {"output", "checkpoints", "remat", "save_every", "log_every", "epochs"}
LARGEST_RANK = 2**16  # a rank above the sizes of a matrix adds nothing, and no model's are larger
LARGEST_STEP = 2**26  # tokens; a batch lies in memory


def parse(description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """The options of a command line."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = whole(1)
    parser.add_argument("folder", type=Path, help="the model's folder")
    parser.add_argument("--data", type=Path, required=True, help="the JSONL file")
    parser.add_argument("--output", type=Path, required=True, help="the adapter's folder")
    parser.add_argument("--lora-rank", type=whole(1, LARGEST_RANK), default=16, help="(%(default)s)")
    parser.add_argument("--lora-alpha", type=positive, default=32.0, help="(%(default)s)")
    parser.add_argument(
        "--targets",
        nargs="+",
        choices=(*TARGETS, *FURTHER_TARGETS),
        default=TARGETS,
        help="matrices with adapters (all but those of shared experts and routers)",
    )
    parser.add_argument("--experts", choices=EXPERTS, default="bfloat16", help="their dtype (%(default)s)")
    parser.add_argument("--sequence-length", type=count, default=2048, help="longer examples are cut (%(default)s)")
    parser.add_argument("--packing", action=argparse.BooleanOptionalAction, default=True, help="(%(default)s)")
    parser.add_argument("--batch-size", type=count, default=4, help="sequences at once (%(default)s)")
    parser.add_argument("--accumulate", type=count, default=1, help="such batches in a step (%(default)s)")
    parser.add_argument("--epochs", type=positive, default=1.0, help="(%(default)s)")
    parser.add_argument("--steps", type=count, help="in the place of --epochs")
    parser.add_argument("--learning-rate", type=positive, default=2e-4, help="after the warm-up (%(default)s)")
    parser.add_argument("--remat", choices=("none", "attention", "names", "all"), default="names", help="(%(default)s)")
    parser.add_argument("--checkpoints", type=Path, help="a folder to save in and to go on from")
    parser.add_argument("--save-every", type=count, default=200, help="steps (%(default)s)")
    parser.add_argument("--log-every", type=count, default=10, help="steps (%(default)s)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of new adapters and of the order (%(default)s)")
    options = parser.parse_args(arguments)
    step = options.batch_size * options.accumulate * options.sequence_length
    if step > LARGEST_STEP:
        names = "--batch-size times --accumulate times --sequence-length"
        parser.error(f"{names} must be at most {LARGEST_STEP} tokens, got {step}")
    return options


def check_folder(option: str, folder: Path, others: Iterable[Path]) -> None:
    """Ends the program unless files can be written into a folder, which may be missing, apart from other folders."""
    nearest = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(each))
    reason = None if nearest.is_dir() else f"{nearest} is no folder"
    if reason is None:
        try:  # what the system lets a program write, it says only when it is tried
            with tempfile.TemporaryDirectory(dir=nearest) as trial:
                (Path(trial) / folder.absolute().relative_to(nearest)).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{nearest} does not take it: {error.strerror}"
    if reason is not None:
        raise SystemExit(f"{option} must be a folder to write into, got {folder}: {reason}")
    if folder.resolve() in [other.resolve() for other in others]:
        raise SystemExit(f"{option} must be a folder of its own, got {folder}")


def check_same_run(options: argparse.Namespace, steps: int) -> None:
    """Ends the program if --checkpoints has steps of a run with other options; notes the options of a new run there."""
    own = {name: value for name, value in vars(options).items() if name not in FREE}
    own |= {"steps": steps, "folder": str(options.folder.resolve())}
    own["data"] = hashlib.sha256(options.data.read_bytes()).hexdigest()
    own = json.loads(json.dumps(own))
    path = options.checkpoints / "options.json"
    if any(each.name.isdecimal() for each in options.checkpoints.glob("*")):
        noted = read_json(path) if path.exists() else own
        for name in own:
            before = noted.get(name)
            if before != own[name]:
                raise SystemExit(
                    f"--checkpoints {options.checkpoints} has a run with {name} {before}, got {own[name]}: "
                    f"take another folder, or change {path} if the run is the same"
                )
    else:
        options.checkpoints.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(own, indent=2) + "\n", encoding="utf-8")
