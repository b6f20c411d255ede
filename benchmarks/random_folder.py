"""Writes a Hugging Face folder with a published model's sizes and formats, and random weights.

    python -m benchmarks.random_folder --model gpt-oss-20b --experts as-stored FOLDER

Times and memory of the folder's model are those of the published one; its loss and its texts are not. The tokenizer has
4,096 tokens, learned from the text that `jgg demo` trains on, and a chat template. A machine without a network so gets
a folder for `jgg finetune`, `jgg generate` and `jgg evaluate`.
"""

import argparse
import json
import sys
from pathlib import Path

import jgg.models
from benchmarks.model_configs import CONFIGS, config_of
from benchmarks.models import EXPERTS, random_model
from jgg.cli import run as run_command
from jgg.cli.demo.preset import load_texts

_TOKENS = 4096
_SPECIAL = "<|start|>", "<|message|>", "<|end|>"
_TEMPLATE = """{% for message in messages %}<|start|>{{ message.role }}<|message|>{% if message.role == "assistant" %}\
{% generation %}{{ message.content }}<|end|>{% endgeneration %}{% else %}{{ message.content }}<|end|>{% endif %}\
{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"""


def write_tokenizer(folder: Path, num_tokens: int = _TOKENS) -> None:
    """Learns a tokenizer, and writes its files and a chat template into a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator("\n\n".join(load_texts()[0]).split("\n\n"), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    own = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": _SPECIAL[-1],
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(own, indent=2) + "\n")


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.random_folder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to write; must be new or empty")
    parser.add_argument("--model", choices=CONFIGS, required=True, help="the model whose sizes are taken")
    parser.add_argument("--layers", type=int, help="number of layers, if fewer than the model's")
    parser.add_argument("--small", action="store_true", help="a small model with the same structure")
    parser.add_argument(
        "--experts", choices=EXPERTS, default="bfloat16", help="format of the experts' weights (default: %(default)s)"
    )
    parser.set_defaults(parser=parser)
    return parser


def run(args) -> int:
    """Writes the folder; returns 0."""
    config = config_of(args.model, args.layers, args.small, args.experts == "as-stored")
    jgg.models.save(random_model(config, args.experts), args.folder)
    write_tokenizer(args.folder, min(_TOKENS, config.vocabulary))
    print(f"wrote {args.folder}")
    return 0


def main(argv=None) -> int:
    """Runs the command and returns the exit code."""
    return run_command(make_parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
