"""Fine-tune a model of a Hugging Face folder, by adapters or whole; `jgg.cli.training` does it."""

from jgg.cli import options


def run(args) -> int:
    """Trains and saves; returns 0."""
    return options.import_with_extra("jgg.cli.training.finetune", "train").run(args)
