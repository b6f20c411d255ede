"""README's picture of JAX libraries: a bar for the tokens/s of each, in groups. `tools.speed` writes it."""

from tools.speed_picture import GAP, LEFT, RIGHT, WIDTH, svg, text

LIBRARIES = {  # library: its name in the picture
    "ragged_dot": "jax.lax.ragged_dot",
    "tokamax": "tokamax",
    "jgg": "jgg",
    "sonic": "SonicMoE (PyTorch)",
}
COLORS = {  # of a theme: of each bar with the number in it
    "light": {
        "ragged_dot": ("#c9d3d8", "#1b1f24"),
        "tokamax": ("#8fa3ad", "#1b1f24"),
        "jgg": ("#3f51b5", "#ffffff"),
        "sonic": ("#c9d3d8", "#1b1f24"),
    },
    "dark": {
        "ragged_dot": ("#46525a", "#ffffff"),
        "tokamax": ("#6b7a83", "#ffffff"),
        "jgg": ("#8c9eff", "#1b1f24"),
        "sonic": ("#46525a", "#ffffff"),
    },
}
TITLE = "The experts of Qwen3-30B-A3B by library, tokens/s"
SUBTITLE = "bfloat16, 8,192 tokens, one GPU; each group's fastest bar has full length; higher is better"
TOP, HEADING, BAR = 82, 24, 20  # pixels
_WIDE = 60  # pixels of a bar that has room for its number


def draw(groups: dict[str, dict[str, float | str]], theme: dict, colors: dict) -> str:
    """Returns the picture as SVG.

    Args:
      groups: by heading and library, tokens/s or, in words, why there are none.
      theme, colors: one of `tools.speed_picture.THEMES` and of COLORS.
    """
    parts = [text(0, 22, TITLE, theme["text"], 20, "bold"), text(0, 46, SUBTITLE, theme["faint"])]
    y = TOP
    for heading, found in groups.items():
        parts.append(text(0, y, heading[:1].upper() + heading[1:], theme["text"], weight="bold"))
        y += HEADING - BAR // 2
        scale = (WIDTH - LEFT - RIGHT) / max(value for value in found.values() if not isinstance(value, str))
        for name in filter(found.__contains__, LIBRARIES):
            parts.append(text(LEFT - 10, y + 14, LIBRARIES[name], theme["text"], anchor="end"))
            parts += _bar(y, found[name], scale, name == "jgg", colors[name], theme)
            y += BAR
        y += GAP + BAR // 2
    return svg(TITLE, y - GAP, parts)


def _bar(y, value, scale, is_bold, color, theme):
    """A bar, and its number in it or, beside a short one, after it; or the words in its place."""
    if isinstance(value, str):
        yield text(LEFT, y + 14, value, theme["faint"], 13)
        return
    fill, ink = color
    width, weight = value * scale, "bold" if is_bold else "normal"
    yield f'<rect x="{LEFT}" y="{y}" width="{max(width, 1):.1f}" height="{BAR - 2}" fill="{fill}"/>'
    if width >= _WIDE:
        yield text(LEFT + width - 5, y + 13.5, _number(value), ink, 13, weight, "end")
    else:
        yield text(LEFT + width + 5, y + 13.5, _number(value), theme["text"], 13, weight)


def _number(value: float) -> str:
    """Tokens/s with three digits, such as "2.10 M" or "307 k"."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.{0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2}f} {unit}"
    return f"{value:.0f}"
