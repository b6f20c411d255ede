"""The picture of Speed: a bar for the speed of each library at the GEMMs of each layer. `tools.speed` writes it."""

BARS = {"tflops": "jgg", "quack": "QuACK", "torch": "torch._grouped_mm"}  # column of gemms.csv: its name in the picture
BOUND = "dense"
TITLE = "Expert GEMMs on one H200, bfloat16, TF/s"
SUBTITLE = "forward, dX and dW of a layer's two GEMMs together; higher is better"
THEMES: dict[str, dict] = {  # colors of text, and of each bar with the number in it
    "light": {
        "text": "#24292f",
        "faint": "#57606a",
        "bars": {"tflops": ("#3f51b5", "#ffffff"), "quack": ("#8fa3ad", "#1b1f24"), "torch": ("#c9d3d8", "#1b1f24")},
    },
    "dark": {
        "text": "#e6edf3",
        "faint": "#9da7b3",
        "bars": {"tflops": ("#8c9eff", "#1b1f24"), "quack": ("#6b7a83", "#ffffff"), "torch": ("#46525a", "#ffffff")},
    },
}
# pixels; narrow, so that a phone, of 390, nearly shows it in full size. LEFT has layers' names, RIGHT the last label.
WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 474, 140, 34, 84, 14, 16


def draw(speeds: dict[str, dict[str, float]], theme: dict) -> str:
    """Returns the picture as SVG in the colors of a theme; the background is transparent."""
    scale = (WIDTH - LEFT - RIGHT) / max(each[BOUND] for each in speeds.values())
    parts = [text(0, 18, TITLE, theme["text"], 15, "bold"), text(0, 40, SUBTITLE, theme["faint"]), *_legend(theme)]
    y = TOP
    for layer, each in speeds.items():
        parts += _layer(y, layer, each, scale, theme)
        y += BAR * len(BARS) + GAP
    return svg(TITLE, y, parts)


def svg(title: str, height: int, parts: list[str], width: int = WIDTH) -> str:
    """Returns a picture of this size, in pixels, that has these parts."""
    font = "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img"><title>{title}</title>'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _legend(theme):
    """A square and a name for each library, and a line for the bound."""
    x = 0
    for name, label in BARS.items():
        yield f'<rect x="{x}" y="54" width="14" height="14" fill="{theme["bars"][name][0]}"/>'
        yield text(x + 20, 66, label, theme["text"])
        x += 40 + 8 * len(label)
    yield _line(x, 52, 18, theme)
    yield text(x + 10, 66, "dense cuBLAS", theme["text"])


def _layer(y, layer, speeds, scale, theme):
    """The name of a layer, its bars and the line of its bound."""
    height = BAR * len(BARS)
    yield text(LEFT - 10, y + height / 2 + 5, layer, theme["text"], anchor="end")
    for i, name in enumerate(BARS):
        color, ink = theme["bars"][name]
        end = LEFT + speeds[name] * scale
        yield f'<rect x="{LEFT}" y="{y + i * BAR}" width="{end - LEFT:.1f}" height="{BAR - 1}" fill="{color}"/>'
        weight = "bold" if name == "tflops" else "normal"
        yield text(end - 5, y + i * BAR + 12.5, f"{speeds[name]:.0f}", ink, 13, weight, "end")
    end = LEFT + speeds[BOUND] * scale
    yield _line(end, y, height, theme)
    yield text(end + 6, y + height / 2 + 4, f"{speeds[BOUND]:.0f}", theme["faint"], 13)


def _line(x, y, height, theme):
    return f'<path d="M{x:.1f} {y}v{height}" stroke="{theme["text"]}" stroke-width="2"/>'


def text(
    x: float, y: float, words: str, color: str, size: int = 13, weight: str = "normal", anchor: str = "start"
) -> str:
    """Words whose start, middle or end (the anchor) is at x."""
    style = f'fill="{color}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{words}</text>'
