"""The picture of whole layers: a bar for the tokens/s of each library at each layer. `tools.speed` writes it."""

from tools.speed_picture import BAR, GAP, LEFT, RIGHT, WIDTH, svg, text

BARS = {  # library in layers.csv: its name in the picture
    "ragged_dot": "jax.lax.ragged_dot",
    "tokamax": "tokamax",
    "jgg": "jgg",
    "sonic": "SonicMoE (PyTorch)",
}
COLORS = {  # of a theme: of each bar with the number in it
    "light": {
        "ragged_dot": ("#6b7a83", "#ffffff"),
        "tokamax": ("#8fa3ad", "#1b1f24"),
        "jgg": ("#3f51b5", "#ffffff"),
        "sonic": ("#dde4e8", "#1b1f24"),
    },
    "dark": {
        "ragged_dot": ("#9aa7b0", "#1b1f24"),
        "tokamax": ("#6b7a83", "#ffffff"),
        "jgg": ("#8c9eff", "#1b1f24"),
        "sonic": ("#39444b", "#ffffff"),
    },
}
TOP = 104
_WIDE = 60  # pixels of a bar that has room for its number


def draw(speeds: dict[str, dict[str, float]], gpus: list[str], theme: dict, colors: dict) -> str:
    """Returns the picture as SVG; the longest bar of each layer is as long as the picture allows.

    Args:
      speeds: tokens/s by layer and library; a library without a number has no bar.
      gpus: the GPUs of the measurements.
      theme, colors: one of `tools.speed_picture.THEMES` and of COLORS.
    """
    title = f"An MoE layer on one {' or '.join(gpus)}, bfloat16, tokens/s"
    subtitle = "forward + backward, router included; each layer's fastest bar has full length; higher is better"
    parts = [text(0, 22, title, theme["text"], 20, "bold"), text(0, 46, subtitle, theme["faint"])]
    parts += _legend([name for name in BARS if any(name in each for each in speeds.values())], theme, colors)
    y = TOP
    for layer, each in speeds.items():
        names = [name for name in BARS if name in each]
        parts.append(text(LEFT - 10, y + BAR * len(names) / 2 + 5, layer, theme["text"], anchor="end"))
        scale = (WIDTH - LEFT - RIGHT) / max(each.values())
        for i, name in enumerate(names):
            parts += _bar(y + i * BAR, each[name], each[name] * scale, name == "jgg", colors[name], theme)
        y += BAR * len(names) + GAP
    return svg(title, y, parts)


def _legend(names, theme, colors):
    x = 0
    for name in names:
        yield f'<rect x="{x}" y="64" width="14" height="14" fill="{colors[name][0]}"/>'
        yield text(x + 20, 76, BARS[name], theme["text"])
        x += 50 + 9 * len(BARS[name])


def _bar(y, value, width, is_bold, color, theme):
    """A bar, and its number in it or, beside a short one, after it."""
    fill, ink = color
    yield f'<rect x="{LEFT}" y="{y}" width="{max(width, 1):.1f}" height="{BAR - 1}" fill="{fill}"/>'
    number, weight = _number(value), "bold" if is_bold else "normal"
    if width >= _WIDE:
        yield text(LEFT + width - 5, y + 12.5, number, ink, 13, weight, "end")
    else:
        yield text(LEFT + width + 5, y + 12.5, number, theme["text"], 13, weight)


def _number(value: float) -> str:
    """Tokens/s with three digits, such as "2.10 M" or "307 k"."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.{0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2}f} {unit}"
    return f"{value:.0f}"
