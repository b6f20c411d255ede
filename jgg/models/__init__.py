"""Whole mixture-of-experts language models in Flax NNX, from Hugging Face folders and back."""

from jgg.models.adapters import load_adapter, save_adapter
from jgg.models.config import ModelConfig, model_config
from jgg.models.decoder import Decoder
from jgg.models.generation import generate, stream
from jgg.models.loading import load
from jgg.models.loss import Scores
from jgg.models.rollouts import Generated, TrainingRows
from jgg.models.saving import named_tensors, save
from jgg.models.streaming import Stream
from jgg.models.text_stream import stream_text

__all__ = [
    "Decoder",
    "Generated",
    "ModelConfig",
    "Scores",
    "Stream",
    "TrainingRows",
    "generate",
    "load",
    "load_adapter",
    "model_config",
    "named_tensors",
    "save",
    "save_adapter",
    "stream",
    "stream_text",
]
