"""The pictures that `tools.speed` draws from the measurements in benchmarks/."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from tools import layers_picture, speed
from tools.speed_picture import LEFT, RIGHT, THEMES, WIDTH

SPEEDS = {
    "small": {"ragged_dot": 20_500.0, "tokamax": 1.05e6, "jgg": 2.1e6, "sonic": 1.999e6},
    "large": {"jgg": 307_400.0, "sonic": 153_700.0},
}


def layer(**cells):
    names = ("layer", "gpu", "tokens", "both_ms", "sonic_both_ms", "sonic_waits_for_cpu", "ragged_dot_both_ms")
    return dict.fromkeys((*names, "tokamax_both_ms"), "") | {"gpu": "H100", "tokens": "8192"} | cells


def test_tokens_per_second_are_of_the_numbers_there_are(monkeypatch):
    rows = [
        layer(layer="a", both_ms="4.00", sonic_both_ms="8.00", ragged_dot_both_ms="400"),
        layer(layer="b", both_ms="4.00", sonic_both_ms="8.00", sonic_waits_for_cpu="yes"),
        layer(layer="c", both_ms="2.00", sonic_both_ms="8.00", sonic_waits_for_cpu="yes", tokamax_both_ms="20"),
    ]
    monkeypatch.setattr(speed, "measurements", lambda _: rows)
    found = speed.tokens_per_second()
    assert found["a"] == pytest.approx({"jgg": 2_048_000, "sonic": 1_024_000, "ragged_dot": 20_480})
    assert found["c"] == pytest.approx({"jgg": 4_096_000, "tokamax": 409_600})
    assert found.keys() == {"a", "c"}


@pytest.mark.parametrize("name", THEMES)
def test_each_layer_has_a_bar_for_each_number(name):
    theme, colors = THEMES[name], layers_picture.COLORS[name]
    picture = layers_picture.draw(SPEEDS, ["H100"], theme, colors)
    ElementTree.fromstring(picture)
    bars = re.findall(rf'<rect x="{LEFT}" y="\d+" width="([\d.]+)" height="\d+" fill="(#\w+)"/>', picture)
    full = WIDTH - LEFT - RIGHT
    widths = [full * share for share in (20.5e3 / 2.1e6, 0.5, 1, 1.999 / 2.1, 1, 0.5)]
    assert [float(width) for width, _ in bars] == pytest.approx(widths, abs=0.1)
    drawn = ["ragged_dot", "tokamax", "jgg", "sonic", "jgg", "sonic"]
    assert [color for _, color in bars] == [colors[who][0] for who in drawn]
    for words in ("20.5 k", "1.05 M", "2.10 M", "2.00 M", "307 k", "154 k", "one H100,", "jax.lax.ragged_dot"):
        assert words in picture


def test_a_library_without_numbers_is_not_in_the_legend():
    picture = layers_picture.draw({"large": SPEEDS["large"]}, ["H100"], THEMES["light"], layers_picture.COLORS["light"])
    assert "SonicMoE (PyTorch)" in picture
    assert "tokamax" not in picture
