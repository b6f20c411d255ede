"""Trains Flax NNX models: one loop for any loss, with checkpoints, metrics and speed measurements."""

from jgg.train import grpo
from jgg.train.checkpoints import TrainingError
from jgg.train.compiling import compiler_options
from jgg.train.in_backward import InBackwardState, OptimizerInBackward
from jgg.train.logs import Log
from jgg.train.loop import Record, Trainer
from jgg.train.losses import balance_weight, held_out_loss, next_token_loss
from jgg.train.masters import MastersState, RoundingState, float32_masters, stochastic_rounding
from jgg.train.meter import Speed
from jgg.train.packed_rows import PackedRows, pack_rows
from jgg.train.preemption import Preempted

__all__ = [
    "InBackwardState",
    "Log",
    "MastersState",
    "OptimizerInBackward",
    "PackedRows",
    "Preempted",
    "Record",
    "RoundingState",
    "Speed",
    "Trainer",
    "TrainingError",
    "balance_weight",
    "compiler_options",
    "float32_masters",
    "grpo",
    "held_out_loss",
    "next_token_loss",
    "pack_rows",
    "stochastic_rounding",
]
