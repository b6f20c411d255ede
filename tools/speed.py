"""Draws the tables and pictures of README and the site from the measurements in benchmarks/.

    python -m tools.speed

A table stands in its page between `<!-- NAME: python -m tools.speed -->` and `<!-- end -->`. TEXTS has the names.
"""

import collections
import math
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from tools import layers_picture, learning_picture, models_tables
from tools.measurements import ROOT, Row, measurements, table
from tools.speed_picture import BARS, BOUND, THEMES, draw

PAGES = ("README.md", "benchmarks/2026-11.md", "docs/index.md", "docs/performance.md", "docs/scaling.md")
DIRECTIONS = ("forward", "dX", "dW")  # the ops of a training step; "gather" is not counted
PICTURED = "Qwen3-30B"  # the layer of the picture of JAX libraries


def layer_speeds() -> dict[str, dict[str, float]]:
    """TF/s of forward, dX and dW of both GEMMs of a layer together, by layer and library.

    The speed is the sum of the FLOPs over the sum of the times.
    """
    flops: dict[str, float] = collections.defaultdict(float)
    times: dict[str, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    for row in measurements("gemms"):
        if row["op"] in DIRECTIONS:
            work = float(row["ms"]) * float(row["tflops"])
            flops[row["layer"]] += work
            for name in (*BARS, BOUND):
                times[row["layer"]][name] += work / float(row[name])
    return {layer: {name: flops[layer] / time for name, time in each.items()} for layer, each in times.items()}


def tokens_per_second() -> dict[str, dict[str, float | str]]:
    """Tokens/s of JAX libraries, or why there are none, by what was measured and library; also SonicMoE and jgg."""
    found: dict[str, dict[str, float | str]] = collections.defaultdict(dict)
    for row in measurements("jax_libraries"):
        speed = 1e3 * int(row["tokens"]) / float(row["ms"]) if row["ms"] else row["failure"]
        found[f"{row['what']}, {row['gpu']}"][row["library"]] = speed
    for row in measurements("layers"):
        if row["layer"] == PICTURED:
            times = {"jgg": row["both_ms"], "sonic": row["sonic_both_ms"]}
            speeds = {name: 1e3 * int(row["tokens"]) / float(ms) for name, ms in times.items()}
            found[f"one layer, forward and backward, {row['gpu']}"] |= speeds
    return found


def summary() -> str:
    """A paragraph that compares the speed of jgg's GEMMs and layers with other libraries."""
    gemms, layers = measurements("gemms"), measurements("layers")
    of_dense = [_ratio(row, "tflops", "dense") for row in gemms]
    quack, torch = (_means_by_op(gemms, name) for name in ("quack", "torch"))
    slower = [quotient for row in gemms if (quotient := _ratio(row, "quack", "tflops")) > 1]
    sonic = [_ratio(row, "forward_ms", "sonic_forward_ms") for row in layers if row["sonic_forward_ms"]]
    slower_layers = [quotient for quotient in sonic if quotient > 1]
    flax_both, flax_forward = (
        [_ratio(row, f"{passes}_ms", f"moe_mlp_{passes}_ms") for row in measurements("flax_layers")]
        for passes in ("both", "forward")
    )
    text = (
        f"On an H200 in bfloat16, jgg's GEMMs reach {_range(of_dense, 100)}% of the speed of a dense GEMM with the "
        f"same FLOPs. Over the GEMMs of seven layers they are {_range(quack)}x as fast as QuACK and {_range(torch)}x "
        f"as fast as `torch._grouped_mm`, depending on the operation (geometric means); QuACK is faster in "
        f"{len(slower)} of {len(gemms)}, by {_percents(slower)}. Whole layers with bfloat16 weights take "
        f"{_mean(sonic):.2f}x SonicMoE's forward time; SonicMoE is faster in {len(slower_layers)} of {len(sonic)}, by "
        f"{_percents(slower_layers)}. On an H100, Flax's float32 parameters make forward and backward take "
        f"{_range(flax_both)}x as long as bfloat16 weights, and forward alone {_range(flax_forward)}x."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False)


def claim() -> str:
    """README's first numbers: jgg compared with other JAX libraries, and a fine-tuning run."""
    times: dict[tuple[str, str], str] = {}
    for row in measurements("jax_libraries"):
        times[row["what"].partition(",")[0], row["library"]] = row["ms"]
    step = next(what for what, _ in times if "in MaxText" in what)
    block, tokamax = (float(times[step, name]) for name in ("jgg", "tokamax"))
    count = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}[int(re.findall(r"\d+", step)[0])]
    tuned = next(row for row in models_tables.fastest() if (row["gpu"], row["model"]) == ("H200", "gpt-oss-20b"))
    text = (
        f"**MaxText trains {tokamax / block:.2f}x as fast with jgg as with tokamax**: on an H100, a step with {count} "
        f"of Qwen3-30B-A3B's layers takes {block:.0f} ms instead of {tokamax:.0f}; `jax.lax.ragged_dot` runs out of "
        "memory even with two layers. On one H200, jgg fine-tunes gpt-oss-20b (random weights) with LoRA at "
        f"{int(tuned['tokens_per_s']):,} tokens/s in {float(tuned['peak_gib']):.0f} GiB."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False)


def speed_table() -> str:
    """A table of the speed of each layer's GEMMs together, and of the whole layer."""
    headings = (
        "layer (T, H, I, E, k)",
        "GEMMs, TF/s",
        "of dense",
        "times QuACK",
        "times torch",
        "layer forward, ms",
        "times SonicMoE",
        "forward + backward, ms",
        "times SonicMoE",
        "memory, % of limit",
    )
    speeds = layer_speeds()
    return table(headings, (_speed_cells(row, speeds.get(row["layer"])) for row in measurements("layers")))


def _speed_cells(row: Row, speed: dict[str, float] | None) -> Iterator[str]:
    sizes = ", ".join(row[name] for name in ("tokens", "features", "hidden", "experts", "topk"))
    yield f"{row['layer']} ({sizes})"
    yield f"{speed['tflops']:.0f}" if speed else ""
    for name in (BOUND, "quack", "torch"):
        yield f"{speed['tflops'] / speed[name]:.2f}" if speed else ""
    yield row["forward_ms"]
    yield f"{_ratio(row, 'sonic_forward_ms', 'forward_ms'):.2f}" if row["sonic_forward_ms"] else ""
    yield row["both_ms"]
    is_comparable = row["sonic_both_ms"] and not row["sonic_waits_for_cpu"]
    yield f"{_ratio(row, 'sonic_both_ms', 'both_ms'):.2f}" if is_comparable else ""
    yield row["memory_percent"]


def fp8_table() -> str:
    """A table of the speed of FP8 products relative to bfloat16, and of whole layers."""
    headings = (
        "layer",
        "products, times bfloat16",
        "of dense FP8",
        "layer in bfloat16, ms",
        "each pass quantizes",
        "`keeps_weights`",
        "once for 4 microbatches",
    )
    layers = {row["layer"]: row for row in measurements("fp8_layers")}
    products = collections.defaultdict(list)
    for row in measurements("fp8_gemms"):
        products[row["layer"]].append(row)
    return table(headings, (_fp8_cells(name, rows, layers.get(name)) for name, rows in products.items()))


def _fp8_cells(name: str, products: list[Row], layer: Row | None) -> Iterator[str]:
    yield name
    for column in ("over_bfloat16", "of_dense_fp8"):
        yield _range([float(row[column]) for row in products])
    yield layer["bfloat16_ms"] if layer else ""
    for column in ("each_pass_ms", "keeps_weights_ms", "once_for_4_ms"):
        yield f"{layer[column]} ({_ratio(layer, 'bfloat16_ms', column):.2f})" if layer else ""


def flax_table() -> str:
    """A table of the times of Flax's layers with float32 parameters."""
    headings = ("layer, on an H100", "`moe_mlp`, bfloat16", "`nnx.MoE`, float32 parameters", "in FP8")
    return table(headings, map(_flax_cells, measurements("flax_layers")))


def _flax_cells(row: Row) -> Iterator[str]:
    yield row["layer"]
    for kind in ("moe_mlp_", "", "fp8_"):
        yield f"{row[f'{kind}forward_ms']}, {row[f'{kind}both_ms']}"


def gpus_table() -> str:
    """A table of a layer's times on several GPUs, where each has as many tokens as one device alone has."""
    headings = ("GPUs", "strategy", "ms", "efficiency", "MB sent by each")
    return table(headings, map(_gpus_cells, measurements("gpus")))


def _gpus_cells(row: Row) -> Iterator[str]:
    yield f"{row['gpus']} {row['gpu']}s"
    yield row["strategy"]
    yield row["ms"]
    yield f"{_ratio(row, 'one_device_ms', 'ms'):.2f}"
    yield row["mb_sent"]


TEXTS: dict[str, Callable[[], str]] = {
    "claim": claim,
    "speed-summary": summary,
    "speed-table": speed_table,
    "fp8-table": fp8_table,
    "gpus-table": gpus_table,
    "flax-table": flax_table,
    "models-table": models_tables.steps,
    "models-short-table": models_tables.fastest_steps,
    "generation-table": models_tables.generation,
}


def outputs() -> dict[Path, str]:
    """Returns the text that each page and picture should have."""
    texts = {ROOT / page: _filled((ROOT / page).read_text()) for page in PAGES}
    speeds = {layer: {name: speed[name] for name in (*BARS, BOUND)} for layer, speed in layer_speeds().items()}
    pictures = ROOT / "docs/pictures"
    for name, theme in THEMES.items():
        texts[pictures / f"speed-{name}.svg"] = draw(speeds, theme)
        colors = layers_picture.COLORS[name]
        texts[pictures / f"layers-{name}.svg"] = layers_picture.draw(tokens_per_second(), theme, colors)
        texts[pictures / f"learning-{name}.svg"] = learning_picture.draw(measurements("grpo"), theme)
        texts[pictures / f"models-{name}.svg"] = layers_picture.draw_models(models_tables.speeds(), theme, colors)
    return texts


def _filled(page: str) -> str:
    """Returns the page with each marked text replaced by a new one."""

    def block(match):
        return f"{match[1]}\n\n{TEXTS[match[2]]()}\n\n{match[3]}"

    begin, end = r"(<!-- (\S+): python -m tools\.speed -->)", "(<!-- end -->)"
    return re.sub(rf"{begin}.*?{end}", block, page, flags=re.DOTALL)


def _ratio(row: Row, numerator: str, denominator: str) -> float:
    return float(row[numerator]) / float(row[denominator])


def _mean(ratios: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _means_by_op(gemms: list[Row], library: str) -> list[float]:
    ratios = collections.defaultdict(list)
    for row in gemms:
        ratios[row["op"]].append(_ratio(row, "tflops", library))
    return [_mean(each) for each in ratios.values()]


def _range(values: list[float], scale: int = 1) -> str:
    digits = 0 if scale == 100 else 2
    return f"{min(values) * scale:.{digits}f} to {max(values) * scale:.{digits}f}"


def _percents(ratios: list[float]) -> str:
    """How far the ratios exceed 1, in percent, such as "1%" or "1 to 3%"."""
    least, most = (f"{(limit - 1) * 100:.0f}" for limit in (min(ratios), max(ratios)))
    return f"{most}%" if least == most else f"{least} to {most}%"


def main():
    """Writes every page and picture."""
    for path, text in outputs().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
