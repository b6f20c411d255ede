"""Reports a run of the demo: lines for the terminal, a JSON file and a plot."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jgg.cli.console import print_table
from jgg.cli.info import devices, origin
from jgg.core.files import replacing
from jgg.train import Record


@dataclasses.dataclass
class Result:
    """The measurements of a run, filled in as training goes on.

    Attributes:
      config: the options.
      implementation: grouped GEMM's implementation.
      train_bytes, held_out_bytes: sizes of the texts.
      parameters: number of parameters of the model.
      active_parameters: number of parameters that act on one byte; of the experts, only topk count.
      train: step, bits_per_byte and tokens_per_second (a token is a byte) of every few steps.
      held_out: step and bits_per_byte of each measurement of the held-out texts.
      expert_load: share of the rows of a batch that each expert of each layer got in the last measurement, 0 before it.
      train_seconds: time in steps of training, without compilation and measurements.
      sample: text that the model wrote.
      interrupted: whether an interrupt from the keyboard ended the run early.
    """

    config: dict[str, Any]
    implementation: str
    train_bytes: int
    held_out_bytes: int
    parameters: int
    active_parameters: int
    train: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    held_out: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    expert_load: list[list[float]] = dataclasses.field(default_factory=list)
    train_seconds: float = 0.0
    sample: str = ""
    interrupted: bool = False

    def add(self, record: Record, values: dict[str, Any]) -> None:
        """Adds what a record of training says."""
        bits, speed = values["loss"] / math.log(2), values["tokens_per_second"]
        self.train.append({"step": record.step, "bits_per_byte": bits, "tokens_per_second": speed})
        self.train_seconds += record.speed.seconds
        if "eval_loss" in values:
            self.held_out.append({"step": record.step, "bits_per_byte": values["eval_loss"] / math.log(2)})


def header(result: Result) -> str:
    """The lines before training: the text, the model, and how and where it runs."""
    config = result.config
    arithmetic = f"{config['dtype']} with experts in FP8" if config["fp8"] else config["dtype"]
    return (
        f"Text: Python's language reference, {result.train_bytes:,} bytes to train on and"
        f" {result.held_out_bytes:,} held out\n"
        f"Model: {config['layers']} layers, top {config['topk']} of {config['experts']} experts;"
        f" {result.parameters:,} parameters, {result.active_parameters:,} active per byte\n"
        f"Grouped GEMM: implementation {result.implementation}, {arithmetic}, on {devices()[0].kind}"
    )


def progress_line(result: Result) -> str:
    """The last measurements in one line."""
    last = result.train[-1]
    held_out = f" (held out {result.held_out[-1]['bits_per_byte']:.2f})" if result.held_out else ""
    return f"{last['bits_per_byte']:.2f} bits/byte{held_out}, {last['tokens_per_second']:,.0f} tokens/s"


def summary(result: Result) -> str:
    """The final result in one line."""
    final = final_numbers(result)
    if final["held_out_bits_per_byte"] is None:
        return f"Interrupted after {final['steps']} steps, before the first held-out measurement"
    return (
        f"Held out: {final['held_out_bits_per_byte']:.3f} bits per byte after {final['steps']} steps,"
        f" {final['train_seconds']:.1f} s of training at {final['tokens_per_second']:,.0f} tokens/s"
    )


def show_details(result: Result) -> None:
    """Prints the load of each expert and the sample of text."""
    experts = result.config["experts"]
    print(f"Expert load, % of the rows of a layer in a batch (even: {1 / experts:.1%})")
    loads = [[layer, *(f"{100 * load:.1f}" for load in loads)] for layer, loads in enumerate(result.expert_load)]
    print_table(["layer", *map(str, range(experts))], loads)
    if result.sample:
        print("Sample:", *result.sample.splitlines(), sep="\n  | ")


def final_numbers(result: Result) -> dict:
    """The results after the last step that was recorded; None for what an interrupt left unmeasured."""
    steps = result.train[-1]["step"]
    tokens = steps * result.config["batch"] * result.config["seq"]
    return {
        "steps": steps,
        "train_bits_per_byte": result.train[-1]["bits_per_byte"],
        "held_out_bits_per_byte": result.held_out[-1]["bits_per_byte"] if result.held_out else None,
        "train_seconds": result.train_seconds,
        "tokens_per_second": tokens / result.train_seconds,
    }


def as_json(result: Result) -> str:
    """The text of the JSON file."""
    content = dataclasses.asdict(result)
    history = {name: content.pop(name) for name in ("train", "held_out")}
    content |= origin() | {"final": final_numbers(result), "history": history}
    return json.dumps(content, indent=2) + "\n"


def write_plot(result: Result, path: Path) -> Path:
    """Draws the loss against the steps, and the load of each expert; returns the file."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    losses, loads = figure.subplots(1, 2)
    figure.suptitle(f"{summary(result)} ({result.implementation}, {devices()[0].kind})")
    for name, measured, style in (("training", result.train, "-"), ("held out", result.held_out, "o-")):
        steps = [point["step"] for point in measured]
        losses.plot(steps, [point["bits_per_byte"] for point in measured], style, label=name)
    losses.set(xlabel="step", ylabel="bits per byte")
    losses.legend()
    losses.grid(alpha=0.3)
    percent = 100 * np.asarray(result.expert_load)  # [layers, E]
    even = 100 / percent.shape[1]
    farthest = max(abs(percent - even).max(), 0.01 * even)  # an even load has the middle color
    image = loads.imshow(percent, cmap="Blues", vmin=even - farthest, vmax=even + farthest, aspect="auto")
    for (layer, expert), load in np.ndenumerate(percent):
        color = "white" if load > even + 0.2 * farthest else "black"
        loads.text(expert, layer, f"{load:.1f}", ha="center", va="center", color=color)
    loads.set(xlabel="expert", ylabel="layer", title=f"load in % of a layer's rows (even: {even:.4g})")
    loads.set(xticks=range(percent.shape[1]), yticks=range(percent.shape[0]))
    figure.colorbar(image, ax=loads)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return path
