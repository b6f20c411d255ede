"""The options of `jgg evaluate`."""

from pathlib import Path

from _jgg_command.arguments import Parser, new_file, positive_int, seed, whole
from _jgg_command.options import add_experts, add_model_and_adapter, add_shared
from _jgg_command.training import add_devices, add_skip_unmarked

DESCRIPTION = "Measure a model's loss on texts, and how it does in tasks of lm-eval."
DTYPES = ("bfloat16", "float32")


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    add_model_and_adapter(parser)
    what = "JSONL or parquet files, or folders of Hugging Face datasets: loss, perplexity, bits per byte of each"
    parser.add_argument("--data", type=Path, nargs="+", metavar="FILE", help=what)
    add_skip_unmarked(parser)
    _add_tasks(parser)
    what = "documents of each task, and sequences of each file, drawn by --seed (default: all)"
    parser.add_argument("--limit", type=positive_int, metavar="N", help=what)
    what = "tokens of a sequence, at most (default: 2048 for --data, as many as the model takes for --tasks)"
    parser.add_argument("--sequence-length", type=positive_int, metavar="N", help=what)
    what = "sequences that are computed at once, on all devices together (default: as many as have 16,384 tokens)"
    parser.add_argument("--batch-size", type=positive_int, metavar="N", help=what)
    add_experts(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the computation (default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of what is drawn (default: %(default)s)")
    add_devices(parser)
    what = "JSON file to write with the results, the command, its options, versions and the device"
    parser.add_argument("--output", type=new_file, metavar="FILE", help=what)
    add_shared(parser, "json", quiet={"help": "show no progress of tasks"})


def _add_tasks(parser: Parser) -> None:
    what = "tasks of lm-eval, a comma list; `lm-eval ls tasks` lists them"
    parser.add_argument("--tasks", metavar="LIST", help=what)
    what = "a folder with tasks of your own, in lm-eval's YAML"
    parser.add_argument("--include-path", type=Path, metavar="FOLDER", help=what)
    what = "examples before each question of a task (default: as the task says)"
    parser.add_argument("--num-fewshot", type=whole(0), metavar="N", help=what)
    what = "put the questions of tasks into the folder's chat template"
    parser.add_argument("--apply-chat-template", action="store_true", help=what)
