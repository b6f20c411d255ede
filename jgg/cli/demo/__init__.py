"""Train a small mixture-of-experts language model here and plot what it did.

The model, over bytes and with `jgg.nnx.MoE` layers, learns the language reference that Python
carries for `help()`. Needs no network. Writes PREFIX.png and PREFIX.json.
"""

from jgg.cli.demo.command import Settings, add_arguments, run

__all__ = ["Settings", "add_arguments", "run"]
