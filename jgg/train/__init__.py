"""Trains models of Flax NNX: one loop, with checkpoints, metrics and a meter of speed, for any loss."""

from jgg.train.checkpoints import TrainingError
from jgg.train.compiling import compiler_options
from jgg.train.loop import Record, Trainer
from jgg.train.meter import Speed

__all__ = ["Record", "Speed", "Trainer", "TrainingError", "compiler_options"]
