"""The picture of a run of examples/grpo.py: reward and share of right answers over steps. `tools.speed` writes it."""

from collections.abc import Iterator

from tools.measurements import Row
from tools.speed_picture import WIDTH, svg, text

TITLE = "The demo's model learns by GRPO on two CPU cores"
SUBTITLE = "means of ten steps, 256 answers each"
LINES = {"reward": ("tflops", "reward"), "right": ("quack", "answers that are all right")}  # column: color and name
TOP, HEIGHT, LEFT, BOTTOM = 92, 200, 50, 44  # pixels


def draw(rows: list[Row], theme: dict) -> str:
    """Returns the picture as SVG in the colors of a theme (one of `tools.speed_picture.THEMES`)."""
    last = max(int(row["step"]) for row in rows)
    scale = (WIDTH - LEFT - 20) / last
    parts = [text(0, 18, TITLE, theme["text"], 15, "bold"), text(0, 40, SUBTITLE, theme["faint"])]
    parts += [*_axes(last, scale, theme), *_legend(theme)]
    for column, (color, _) in LINES.items():
        points = [(LEFT + scale * int(row["step"]), _height(float(row[column]))) for row in rows]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{theme["bars"][color][0]}" stroke-width="3"/>')
    return svg(TITLE, TOP + HEIGHT + BOTTOM, parts)


def _height(share: float) -> float:
    return TOP + HEIGHT * (1 - share)


def _axes(last: int, scale: float, theme: dict) -> Iterator[str]:
    """A line for each quarter, and the steps below."""
    for percent in (0, 25, 50, 75, 100):
        y = _height(percent / 100)
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - 20}" stroke="{theme["faint"]}" stroke-opacity="0.35"/>'
        yield text(LEFT - 10, y + 5, f"{percent}%", theme["faint"], 13, anchor="end")
    for step in range(0, last + 1, 100):
        yield text(LEFT + scale * step, TOP + HEIGHT + 20, f"{step}", theme["faint"], 13, anchor="middle")
    yield text((LEFT + WIDTH - 20) / 2, TOP + HEIGHT + 40, "steps", theme["faint"], 13, anchor="middle")


def _legend(theme: dict) -> Iterator[str]:
    x = 0
    for color, name in LINES.values():
        yield f'<rect x="{x}" y="54" width="14" height="14" fill="{theme["bars"][color][0]}"/>'
        yield text(x + 20, 66, name, theme["text"])
        x += 40 + 8 * len(name)
