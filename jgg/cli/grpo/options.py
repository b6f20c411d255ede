"""The options of `jgg grpo`."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import ClassVar

from jgg.cli.arguments import number, path, positive_float, positive_int, whole
from jgg.cli.declarations import REQUIRED, Options, changed, flag, option
from jgg.cli.training.options import Batch, Caches, Data, Experts, Finetune, Learning, Lora, Mesh, Output
from jgg.core.choices import AGGREGATIONS, DTYPE_NAMES, IMPORTANCES, KL_ESTIMATORS, REWARD_SCALES

_not_negative = number("0 or more and finite", lambda value: 0 <= value < math.inf)
_data, _sampling, _loss = (functools.partial(option, group) for group in ("data", "sampling", "loss"))

# a table: the meaning of each option, then its type, its default and the rest
# fmt: off


@dataclasses.dataclass(kw_only=True)
class Prompts(Options):
    """What is answered, and what answers are worth."""

    prompts: list[Path] = _data(
        "JSONL or parquet files, or folders of Hugging Face datasets, with the column \"prompt\": a text, or a list of"
        " messages for the chat template", path, REQUIRED, nargs="+", metavar="FILE", is_read=True, may_change=True)
    reward: str = _data(
        "FILE.py, whose function reward(prompts, completions, **columns) returns a number for each completion;"
        " FILE.py:NAME for another function; exact or number, which compare with the column \"answer\"",
        default=REQUIRED, metavar="REWARD", is_read=True)
    max_prompt_tokens: int | None = _data("leave out longer prompts", positive_int, metavar="N", shown="none")
    eval_prompts: list[Path] | None = _data(
        "prompts that are not learned: their mean reward is measured as training goes on", path, nargs="+",
        metavar="FILE", is_read=True, may_change=True)
    eval_every: int = changed(Data, "eval_every",
        what="steps between two measurements of --eval-prompts; the last step is measured too")
    eval_temperature: float = _data("sampling temperature of answers to --eval-prompts; 0 decodes greedily",
        _not_negative, 0.0, metavar="T", may_change=True)


@dataclasses.dataclass(kw_only=True)
class Sampling(Options):
    """How answers are drawn."""

    problems: int = _sampling("prompts per batch", positive_int, 16, metavar="N")
    samples: int = _sampling("answers per prompt", whole(2), 16, metavar="N")
    max_new_tokens: int = _sampling("longest answer, in tokens", positive_int, 256, metavar="N")
    temperature: float = _sampling("sampling temperature, at which the loss takes log-probabilities too",
        positive_float, 1.0, metavar="T")
    dynamic_sampling: int = _sampling(
        "times per batch that prompts whose answers all have the same reward are replaced by others", whole(0), 0,
        metavar="N")
    rows: int | None = _sampling("answers drawn at once; as they end, the next prompts take their place",
        positive_int, metavar="N", shown="all of a batch", may_change=True)
    batch_invariant: bool = flag("sampling",
        "on a GPU, sampler and trainer compute the same bits, for models that jgg.models.Decoder says")
    replay: bool = flag("sampling", "the trainer uses the experts that the sampler chose")


@dataclasses.dataclass(kw_only=True)
class Loss(Options):
    """Variants of the loss, see `jgg.train.grpo`."""

    scale_rewards: str = _loss(
        "what advantages are divided by: the standard deviation of a prompt's rewards, or of a batch's; none: nothing",
        default=REWARD_SCALES[0], choices=REWARD_SCALES)
    aggregation: str = _loss(
        "token: mean over all tokens of a batch; sequence: over answers of the means over their tokens; constant: the"
        " sum divided by the answers times --max-new-tokens", default=AGGREGATIONS[0], choices=AGGREGATIONS)
    importance: str = _loss("sequence: all tokens of an answer have the geometric mean of their ratios",
        default=IMPORTANCES[0], choices=IMPORTANCES)
    clip: tuple[float, float] = _loss("the ratio's bounds are 1 - LOW and 1 + HIGH", _not_negative, (0.2, 0.28),
        nargs=2, metavar=("LOW", "HIGH"), shown="0.2 0.28")
    delta: float | None = _loss("bound of the ratio where advantages are negative, above 1 + HIGH",
        positive_float, metavar="X", shown="none")
    kl: float = _loss("weight of the KL divergence from the model without adapters", _not_negative, 0.0, metavar="X")
    kl_estimator: str = _loss("how the KL divergence is estimated", default="k3", choices=KL_ESTIMATORS)


# The options stand in the order from the last class to the first.
@dataclasses.dataclass(kw_only=True)
class Grpo(Output, Mesh, Lora, Learning, Loss, Sampling, Prompts, Caches, Experts):
    """Teach a model of a Hugging Face folder by rewards of its answers (GRPO): LoRA adapters, or with --full all."""

    example = "jgg grpo Qwen/Qwen3-30B-A3B --prompts train.jsonl --reward reward.py --output adapter --remat all"
    page = "reinforcement-learning/"
    module = "jgg.cli.grpo.run"
    batch_size: ClassVar[None] = None  # --problems and --samples say it

    dtype: str = option("model", "of the computation", default="bfloat16", choices=DTYPE_NAMES)
    output: Path = changed(Finetune, "output")
    full: bool = changed(Finetune, "full")
    updates: int = option("training", "steps that learn from the same batch of answers", positive_int, 1, metavar="N")
    accumulate: int = changed(Batch, "accumulate", what="parts that a batch of answers is learned in, to save memory")
    epochs: float = changed(Learning, "epochs", what="passes over the prompts, with --samples answers to each")
    learning_rate: float | None = changed(Learning, "learning_rate", shown="1e-4, with --full 1e-6")
    weight_decay: float = changed(Finetune, "weight_decay")
    remat: str = changed(Finetune, "remat")
