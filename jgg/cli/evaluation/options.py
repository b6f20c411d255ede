"""The options of `jgg evaluate`."""

import dataclasses
import functools
from pathlib import Path

from jgg.cli.arguments import new_file, path, positive_int, seed, whole
from jgg.cli.declarations import changed, option, switch
from jgg.cli.training.options import Caches, Data, Devices, Experts, Model

_measured, _tasks, _output = (functools.partial(option, group) for group in ("what is measured", "tasks", "output"))

# a table: the meaning of each option, then its type, its default and the rest
# fmt: off


@dataclasses.dataclass(kw_only=True)
class WithAdapter(Model):
    """A model and, optionally, an adapter."""

    adapter: str | None = option("model", "the folder of a LoRA adapter in PEFT's format", metavar="ADAPTER",
        is_place=True, is_read=True)


@dataclasses.dataclass(kw_only=True)
class Evaluate(Devices, Caches, Experts, WithAdapter):
    """Measure a model's loss on texts, and how it does in tasks of lm-eval."""

    example = "jgg evaluate model adapter --data test.jsonl --output results.json"
    page = "evaluate/"
    module = "jgg.cli.evaluation.run"

    dtype: str = option("model", "of the computation", default="bfloat16", choices=("bfloat16", "float32"))
    data: list[Path] | None = _measured(
        "JSONL or parquet files, or folders of Hugging Face datasets: loss, perplexity, bits per byte of each", path,
        nargs="+", metavar="FILE", is_read=True)
    skip_unmarked: bool = changed(Data, "skip_unmarked", group="what is measured")
    limit: int | None = _measured("documents of each task, and sequences of each file, drawn by --seed", positive_int,
        metavar="N", shown="all")
    sequence_length: int | None = _measured("maximum tokens per sequence", positive_int, metavar="N",
        shown="2048; for tasks max_position_embeddings")
    batch_size: int | None = _measured("sequences per batch, over all devices together", positive_int,
        metavar="N", shown="as many as have 16,384 tokens")
    seed: int = _measured("seed of what is drawn", seed, 0, metavar="SEED")
    tasks: str | None = _tasks("tasks of lm-eval, a comma list; `lm-eval ls tasks` lists them", metavar="LIST")
    include_path: Path | None = _tasks("a folder with tasks of your own, in lm-eval's YAML", path, metavar="FOLDER",
        is_read=True)
    num_fewshot: int | None = _tasks("examples before each question of a task", whole(0), metavar="N",
        shown="as the task says")
    apply_chat_template: bool = switch("tasks", "put the questions of tasks into the folder's chat template")
    output: Path | None = _output(
        "JSON file to write with the results, the command, its options, versions and the device", new_file,
        metavar="FILE")
    json: bool = switch("output", "print JSON instead of text")
    quiet: bool = switch("output", "show no progress of tasks", is_noted=False)
