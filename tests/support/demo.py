"""Settings of `jgg demo` that train almost nothing."""

from jgg.cli import demo


def settings(**changes):
    """The settings, of one step on a CPU in float32, with some that are others."""
    small = {"steps": 1, "batch": 1, "seq": 8, "hidden": 64, "layers": 1, "experts": 2, "topk": 1, "seed": 0, "out": ""}
    how = {"implementation": None, "dtype": "float32", "fp8": False, "temperature": 1.0, "quiet": True}
    return demo.Settings(**small | how | changes)
