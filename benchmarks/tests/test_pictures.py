"""The pictures that `tools.speed` draws from the measurements in benchmarks/."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from tools import layers_picture, models_tables, speed
from tools.layers_picture import LEFT, RIGHT, WIDTH
from tools.speed_picture import THEMES

GROUPS = {
    "one layer, H100": {"ragged_dot": 20_500.0, "tokamax": "out of memory", "jgg": 2.1e6, "sonic": 1.999e6},
    "a model, H100": {"jgg": 307_400.0, "jgg_gmm": 230_550.0, "tokamax": 153_700.0},
}


def test_tokens_per_second_are_of_the_numbers_there_are(monkeypatch):
    measured = {"what": "one layer", "gpu": "H100", "tokens": "8192", "ms": "", "failure": ""}
    layer = {"gpu": "H200", "tokens": "4096", "both_ms": "4.00", "sonic_both_ms": "8.00"}
    files = {
        "jax_libraries": [
            measured | {"library": "ragged_dot", "failure": "out of memory"},
            measured | {"library": "jgg", "ms": "2.00"},
        ],
        "layers": [layer | {"layer": "Qwen3-30B"}, layer | {"layer": "Mixtral"}],
    }
    monkeypatch.setattr(speed, "measurements", files.__getitem__)
    assert speed.tokens_per_second() == {
        "one layer, H100": {"ragged_dot": "out of memory", "jgg": 4_096_000},
        "one layer, forward and backward, H200": {"jgg": 1_024_000, "sonic": 512_000},
    }


@pytest.mark.parametrize("name", THEMES)
def test_each_number_has_a_bar(name):
    theme, colors = THEMES[name], layers_picture.COLORS[name]
    picture = layers_picture.draw(GROUPS, theme, colors)
    ElementTree.fromstring(picture)
    bars = re.findall(rf'<rect x="{LEFT}" y="\d+" width="([\d.]+)" height="\d+" fill="(#\w+)"/>', picture)
    full = WIDTH - LEFT - RIGHT
    widths = [full * share for share in (20.5e3 / 2.1e6, 1, 1.999 / 2.1, 0.5, 0.75, 1)]
    assert [float(width) for width, _ in bars] == pytest.approx(widths, abs=0.1)
    drawn = "ragged_dot", "jgg", "sonic", "tokamax", "jgg_gmm", "jgg"
    assert [color for _, color in bars] == [colors[who][0] for who in drawn]
    for words in ("20.5 k", "2.10 M", "2.00 M", "307 k", "231 k", "154 k", "jax.lax.ragged_dot", "One layer, H100"):
        assert f">{words}</text>" in picture
    assert picture.count(">out of memory</text>") == 1


def test_the_fastest_step_of_a_model_counts(monkeypatch):
    row = {"model": "gpt-oss-20b", "experts": "as-stored", "run": "lora", "params": "bfloat16", "remat": "names"}
    row |= {"layers": "", "batch": "2", "gpu": "H100", "ms": "400", "tokens_per_s": "20480", "peak_gib": "30.2"}
    row |= {"percent_of_roofline": "50"}
    fast = {"remat": "attention", "ms": "380", "tokens_per_s": "21558", "peak_gib": "32.1"}
    rows = [row, row | fast, row | {"gpu": "H200"}, row | fast | {"gpu": "H200", "ms": "340", "tokens_per_s": "24000"}]
    monkeypatch.setattr(models_tables, "measurements", {"models": rows}.__getitem__)
    assert models_tables.speeds() == {"fine-tuning by LoRA": {"gpt-oss-20b, MXFP4": 24000.0}}
    _, _, *cells = models_tables.fastest_steps().splitlines()
    assert [cell.split(" | ")[1:3] for cell in cells] == [["LoRA, MXFP4 experts", "24,000"]]
    assert [float(each["ms"]) for each in models_tables.fastest()] == [380, 340]
    assert len(models_tables.steps().splitlines()) == 2 + len(rows)
