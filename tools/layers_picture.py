"""Pictures of bars of tokens/s in groups: JAX libraries, and whole models. `tools.speed` writes them."""

from tools.speed_picture import GAP, svg, text

LIBRARIES = {  # library: its name in the picture
    "ragged_dot": "jax.lax.ragged_dot",
    "tokamax": "tokamax",
    "jgg_gmm": "jgg, GEMMs alone",
    "jgg": "jgg",
    "sonic": "SonicMoE (PyTorch)",
}
COLORS = {  # of a theme: of each bar with the number in it
    "light": {
        "ragged_dot": ("#c9d3d8", "#1b1f24"),
        "tokamax": ("#8fa3ad", "#1b1f24"),
        "jgg_gmm": ("#7986cb", "#1b1f24"),
        "jgg": ("#3f51b5", "#ffffff"),
        "sonic": ("#c9d3d8", "#1b1f24"),
    },
    "dark": {
        "ragged_dot": ("#46525a", "#ffffff"),
        "tokamax": ("#6b7a83", "#ffffff"),
        "jgg_gmm": ("#5c6bc0", "#ffffff"),
        "jgg": ("#8c9eff", "#1b1f24"),
        "sonic": ("#46525a", "#ffffff"),
    },
}
TITLE = "The experts of Qwen3-30B-A3B by library, tokens/s"
SUBTITLE = "bfloat16, 8,192 tokens, one GPU; higher is better"
MODELS_TITLE = "Whole models on one H200, tokens/s"
MODELS_SUBTITLE = "random weights of the real sizes; higher is better"
SCALE = "each group's fastest bar has full length"
Bar = tuple[str, float | str, tuple[str, str], bool]  # its label, tokens/s or words, its colors, whether it is bold
# pixels; so narrow that a phone, of 390, shows it nearly in full size. LEFT has the labels.
WIDTH, LEFT, RIGHT, TOP, HEADING, BAR = 474, 140, 4, 92, 24, 20
_WIDE = 60  # pixels of a bar that has room for its number


def draw(groups: dict[str, dict[str, float | str]], theme: dict, colors: dict) -> str:
    """Returns the picture of libraries as SVG.

    Args:
      groups: by heading and library, tokens/s or, in words, why there are none.
      theme, colors: one of `tools.speed_picture.THEMES` and of COLORS.
    """
    bars = {
        heading: [(LIBRARIES[name], found[name], colors[name], name == "jgg") for name in LIBRARIES if name in found]
        for heading, found in groups.items()
    }
    return draw_bars(TITLE, SUBTITLE, bars, theme)


def draw_models(groups: dict[str, dict[str, float]], theme: dict, colors: dict) -> str:
    """Returns the picture of whole models as SVG; `groups` has tokens/s by heading and model."""
    bars = {
        heading: [(name, value, colors["jgg"], False) for name, value in found.items()]
        for heading, found in groups.items()
    }
    return draw_bars(MODELS_TITLE, MODELS_SUBTITLE, bars, theme)


def draw_bars(title: str, subtitle: str, groups: dict[str, list[Bar]], theme: dict) -> str:
    """Returns a picture of groups of bars as SVG."""
    parts = [text(0, 18, title, theme["text"], 15, "bold")]
    parts += [text(0, y, words, theme["faint"], 13) for y, words in ((40, subtitle), (58, SCALE))]
    y = TOP
    for heading, bars in groups.items():
        parts.append(text(0, y, heading[:1].upper() + heading[1:], theme["text"], 13, "bold"))
        y += HEADING - BAR // 2
        scale = (WIDTH - LEFT - RIGHT) / max(value for _, value, _, _ in bars if not isinstance(value, str))
        for label, value, color, is_bold in bars:
            parts.append(text(LEFT - 10, y + 14, label, theme["text"], 13, anchor="end"))
            parts += _bar(y, value, scale, is_bold, color, theme)
            y += BAR
        y += GAP + BAR // 2
    return svg(title, y - GAP, parts, WIDTH)


def _bar(y, value, scale, is_bold, color, theme):
    """A bar with its number in it, or after it if the bar is short; or words instead of a bar."""
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
