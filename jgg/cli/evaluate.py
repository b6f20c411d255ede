"""Measure a model's loss on texts, and how it does in tasks of lm-eval; `jgg.cli.evaluation` does it."""

from jgg.cli import options


def run(args) -> int:
    """Prints what was measured; returns 0."""
    return options.import_with_extra("jgg.cli.evaluation.run", "train").run(args)
