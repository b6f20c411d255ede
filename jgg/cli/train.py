"""Train a new model and save it as a Hugging Face folder; `jgg.cli.training` does it."""

from jgg.cli import options


def run(args) -> int:
    """Trains and saves; returns 0."""
    return options.import_with_extra("jgg.cli.training.new", "train").run(args)
