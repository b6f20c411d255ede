"""Draws the picture that links to the site show: python -m tools.social_picture."""

import textwrap

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from jgg.cli.parsing import DESCRIPTION
from tools.measurements import ROOT

COMMANDS = """\
$ jgg finetune openai/gpt-oss-20b --data train.jsonl --output adapter
$ jgg generate openai/gpt-oss-20b adapter --chat"""


def main():
    """Writes docs/pictures/social.png, 1200 x 630 pixels."""
    figure = pyplot.figure(figsize=(12, 6.3), dpi=100, facecolor="#3f51b5")
    figure.text(0.07, 0.74, "jgg", color="white", fontsize=84, weight="bold")
    words = textwrap.fill(DESCRIPTION, 44)
    figure.text(0.07, 0.64, words, color="white", fontsize=30, linespacing=1.4, va="top")
    figure.text(0.07, 0.1, COMMANDS, color="#c5cae9", fontsize=16, family="monospace", linespacing=1.6)
    figure.savefig(ROOT / "docs/pictures/social.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
