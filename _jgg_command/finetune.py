"""The options of `jgg finetune`."""

import argparse
from pathlib import Path

from _jgg_command.arguments import Parser, positive_float, whole
from _jgg_command.options import add_experts
from _jgg_command.training import add_model, add_training

DESCRIPTION = "Fine-tune a model of a Hugging Face folder: LoRA adapters that PEFT loads, or with --full all of it."
# as in jgg/models/parts.py: of attention, latent attention, recurrent layers and MLPs
TARGETS = (
    *("w_q", "w_k", "w_v", "w_o"),
    *("w_q_a", "w_q_b", "w_kv_a", "w_kv_b"),
    *("w_qkvz", "w_qkv", "w_z", "w_out"),
    *("w_gate_up", "w_down", "w_dense_gate_up", "w_dense_down"),
)
FURTHER_TARGETS = ("w_ba", "w_b", "w_a", "w_shared_gate_up", "w_shared_down", "w_router")
_LARGEST_RANK = 2**16  # a rank above the sizes of a matrix adds nothing, and no model's are larger


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    add_model(
        parser,
        "MODEL",
        "the model's folder, with config.json, safetensors files and tokenizer.json, or its name on the Hub",
    )
    what = "the adapter's folder, or with --full the folder of the new model"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=what)
    what = "train all parameters in the place of adapters"
    parser.add_argument("--full", action=argparse.BooleanOptionalAction, default=False, help=what)
    rank = whole(1, _LARGEST_RANK)
    parser.add_argument("--lora-rank", type=rank, default=16, metavar="N", help="of adapters (default: %(default)s)")
    what = "adapters are scaled by alpha / rank (default: %(default)s)"
    parser.add_argument("--lora-alpha", type=positive_float, default=32.0, metavar="ALPHA", help=what)
    what = f"matrices with adapters, of %(choices)s (default: all but the last {len(FURTHER_TARGETS)})"
    choices = (*TARGETS, *FURTHER_TARGETS)
    parser.add_argument("--targets", nargs="+", choices=choices, default=list(TARGETS), metavar="NAME", help=what)
    add_experts(parser)
    add_training(parser, learning_rate="2e-4, with --full 1e-5", weight_decay=0.0, remat="names", split=False)
