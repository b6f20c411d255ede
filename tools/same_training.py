"""Trains the demo's model in several variants, from the same weights and batches; writes PREFIX.json and PREFIX.png.

    python tools/same_training.py                                           # the implementations xla and triton
    python tools/same_training.py --variants triton triton+fp8 --out fp8    # bfloat16 and FP8

The losses of the variants differ only by rounding, but training amplifies it. So compare the difference between
variants with the noise, which is the spread of each variant's losses over the seeds.
"""

import argparse
import dataclasses
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

from benchmarks.small_model import Settings, held_out_bits, held_out_windows, load_corpus, make_model, make_trainer
from jgg.cli.commands import Demo
from jgg.cli.declarations import add_options
from jgg.cli.info import devices, versions
from jgg.cli.options import default_dtype

PEAK_RATE = 3e-3
SMOOTHED = 10  # steps whose mean is a point of a curve; the final training loss is the mean of 10 points


def train(settings: Settings, variant: str):
    """Trains one variant; returns its curve and its final losses, in bits per byte.

    Args:
      variant: an implementation, with "+fp8" after it to multiply in FP8.
    """
    implementation, _, quantization = variant.partition("+")
    settings = dataclasses.replace(settings, implementation=implementation, fp8=quantization == "fp8")
    corpus = load_corpus()
    init_key, data_key = jax.random.split(jax.random.key(settings.seed))
    model = make_model(settings, nnx.Rngs(init_key))
    warmup = max(1, min(100, settings.steps // 10))
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0.0, PEAK_RATE, warmup, max(settings.steps, warmup + 1)))
    trainer, batch_of = make_trainer(model, optimizer, settings, corpus.train, data_key)
    (record,) = trainer.fit(batch_of, settings.steps, every=())
    losses = record.metrics["bits_per_byte"]
    held_out = None
    if settings.implementation != "interpret":  # which would take hours
        held_out = held_out_bits(trainer.model, *held_out_windows(corpus.held_out, settings.seq, settings.batch)).item()
    whole = len(losses) // SMOOTHED * SMOOTHED or len(losses)
    return {
        "variant": variant,
        "seed": settings.seed,
        "train": losses[:whole].reshape(-1, min(SMOOTHED, whole)).mean(axis=1).tolist(),
        "final_train": float(np.mean(losses[-10 * SMOOTHED :])),
        "final_held_out": held_out,
    }


def compare(runs):
    """Mean and spread of each variant's final losses, and the largest difference between losses of the same seed."""
    summary = {"variants": {}, "largest_difference_of_a_seed": {}}
    for loss in ("final_train", "final_held_out"):
        by_seed = {}
        for run in runs:
            if run[loss] is not None:
                by_seed.setdefault(run["seed"], []).append(run[loss])
        differences = [max(losses) - min(losses) for losses in by_seed.values() if len(losses) > 1]
        summary["largest_difference_of_a_seed"][loss] = max(differences, default=None)
    for name in dict.fromkeys(run["variant"] for run in runs):
        own = [run for run in runs if run["variant"] == name]
        summary["variants"][name] = {
            loss: {"mean": float(np.mean(values)), "spread": max(values) - min(values)}
            for loss in ("final_train", "final_held_out")
            for values in [[run[loss] for run in own if run[loss] is not None]]
            if values
        }
    return summary


def plot(runs, title) -> Figure:
    """Draws the curves of all runs, and their differences from the first variant with the same seed."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    curves, differences = figure.subplots(1, 2)
    figure.suptitle(title)
    names = list(dict.fromkeys(run["variant"] for run in runs))
    first = {run["seed"]: run for run in runs if run["variant"] == names[0]}
    for run in runs:
        place = names.index(run["variant"])
        style = {"color": f"C{place}", "linestyle": ("-", "--", ":")[place % 3], "linewidth": 1, "alpha": 0.8}
        label = run["variant"] if run["seed"] == min(first) else None
        losses = run["train"]
        steps = SMOOTHED * (1 + np.arange(len(losses)))
        curves.plot(steps, losses, label=label, **style)
        if place:
            others = first[run["seed"]]["train"]
            label = f"{run['variant']}, seed {run['seed']}"
            differences.plot(steps, np.subtract(losses, others), label=label, linewidth=1)
    curves.set(xlabel="step", ylabel="bits per byte", title="training loss of every seed")
    curves.legend()
    differences.set(xlabel="step", ylabel="bits per byte", title=f"loss less that of {names[0]} with the same seed")
    if len(names) > 1:
        differences.legend()
    for axes in (curves, differences):
        axes.grid(alpha=0.3)
    return figure


def main():
    """Trains, prints the final losses, and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, Demo)
    names = [name + quantization for name in ("xla", "triton", "interpret") for quantization in ("", "+fp8")]
    parser.add_argument("--variants", nargs="+", choices=names, default=["xla", "triton"], help="(%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(%(default)s)")
    parser.set_defaults(steps=2000, out="same-training", quiet=True)
    options = parser.parse_args()
    options.dtype = options.dtype or default_dtype()
    settings = Settings(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)})
    runs = []
    for seed, variant in itertools.product(options.seeds, options.variants):
        runs.append(train(dataclasses.replace(settings, seed=seed), variant))
        print("{variant}, seed {seed}: {final_train:.4f}, held out {final_held_out}".format(**runs[-1]), flush=True)
    summary = compare(runs)
    print(json.dumps(summary, indent=2))
    kind = devices()[0].kind
    content = {"config": dataclasses.asdict(settings), "versions": versions(), "device": kind, **summary, "runs": runs}
    Path(f"{options.out}.json").write_text(json.dumps(content, indent=2) + "\n")
    title = f"{settings.steps} steps, {len(options.seeds)} seeds, {settings.dtype}, {kind}"
    plot(runs, title).savefig(f"{options.out}.png", dpi=120)


if __name__ == "__main__":
    main()
