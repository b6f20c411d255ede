"""Tables and numbers of whole models, of benchmarks/models.csv."""

import collections
from collections.abc import Iterator

from tools.measurements import Row, measurements, table

MODEL_NAMES = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "gpt-oss-20b": "gpt-oss-20b"}
NUM_LAYERS = {"qwen3-30b-a3b": 48, "gpt-oss-20b": 24}
EXPERT_NAMES = {"bfloat16": "bfloat16", "fp8": "FP8", "as-stored": "MXFP4"}
PARAMS_NAMES = {"bfloat16": "bfloat16", "float32": "float32", "masters": "bfloat16, with float32 masters"}
PICTURED_GPU = "H200"
HEADINGS = {  # of the run and the number of sequences
    ("lora", "2"): "fine-tuning by LoRA",
    ("train", "2"): "training all parameters",
    ("decode", "32"): "generation, 32 sequences",
}


def steps() -> str:
    """A table of the steps of whole models."""
    headings = ("model", "what is trained", "GPU", "ms", "tokens/s", "peak memory, GiB", "% of roofline")
    return table(headings, map(_cells_of_step, _rows_of_steps()))


def _rows_of_steps() -> Iterator[Row]:
    return (row for row in measurements("models") if row["run"] in ("lora", "train"))


def _cells_of_step(row: Row) -> Iterator[str]:
    layers = f", {row['layers']} of its {NUM_LAYERS[row['model']]} layers" if row["layers"] else ""
    yield MODEL_NAMES[row["model"]] + layers
    is_lora = row["run"] == "lora"
    trained = (
        f"LoRA, {EXPERT_NAMES[row['experts']]} experts" if is_lora else f"all parameters, {PARAMS_NAMES[row['params']]}"
    )
    yield f'{trained}, `remat="{row["remat"]}"`'
    yield row["gpu"]
    yield row["ms"]
    yield _thousands(row["tokens_per_s"])
    yield row["peak_gib"]
    yield row["percent_of_roofline"]


def fastest_steps() -> str:
    """README's table of whole models: the fastest step of each on PICTURED_GPU."""
    headings = ("model", f"trained on one {PICTURED_GPU}", "tokens/s", "peak memory")
    return table(headings, map(_cells_of_fastest, (row for row in fastest() if row["gpu"] == PICTURED_GPU)))


def fastest() -> list[Row]:
    """The fastest step of each model that is trained in one way, on each kind of GPU."""
    found: dict[str, Row] = {}
    for row in _rows_of_steps():
        name = f"{row['gpu']} {row['model']} {row['run']} {row['experts']} {row['params']}"
        if float(row["ms"]) <= float(found.get(name, row)["ms"]):
            found[name] = row
    return list(found.values())


def _cells_of_fastest(row: Row) -> Iterator[str]:
    model, trained, _, _, speed, peak, _ = _cells_of_step(row)
    yield from (model, trained.partition(", `")[0], speed, f"{float(peak):.0f} GiB")


def generation() -> str:
    """A table of the times of generation by whole models, for each number of sequences."""
    headings = (
        "model",
        "experts",
        "GPU",
        "sequences",
        "prefill of 128 tokens, ms",
        "a token, ms",
        "tokens/s",
        "% of roofline",
    )
    prefills, decodes = (
        {
            (row["model"], row["experts"], row["gpu"], row["batch"]): row
            for row in measurements("models")
            if row["run"] == run
        }
        for run in ("prefill", "decode")
    )
    return table(headings, (_cells_of_generation(prefills[key], row) for key, row in decodes.items()))


def _cells_of_generation(prefill: Row, decode: Row) -> Iterator[str]:
    yield MODEL_NAMES[decode["model"]]
    yield EXPERT_NAMES[decode["experts"]]
    yield decode["gpu"]
    yield decode["batch"]
    yield prefill["ms"]
    yield decode["ms"]
    yield _thousands(decode["tokens_per_s"])
    yield decode["percent_of_roofline"]


def speeds() -> dict[str, dict[str, float]]:
    """Tokens/s of whole models, by what was measured and model: the fastest of each on PICTURED_GPU."""
    found: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for row in measurements("models"):
        heading = HEADINGS.get((row["run"], row["batch"]))
        if heading and row["gpu"] == PICTURED_GPU and row["params"] == "bfloat16":
            kind = f"{row['layers']} layers" if row["layers"] else EXPERT_NAMES[row["experts"]]
            name = f"{MODEL_NAMES[row['model']].removesuffix('-A3B')}, {kind}"  # short, for a picture
            found[heading][name] = max(found[heading].get(name, 0.0), float(row["tokens_per_s"]))
    return {heading: found[heading] for heading in HEADINGS.values() if heading in found}


def _thousands(number: str) -> str:
    return f"{float(number):,.0f}"
