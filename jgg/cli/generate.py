"""Continue a prompt, or talk, with a model of a Hugging Face folder; `jgg.cli.generation` does it."""

from jgg.cli import options


def run(args) -> int:
    """Prints what the model writes; returns 0."""
    return options.import_with_extra("jgg.cli.generation.run", "train").run(args)
