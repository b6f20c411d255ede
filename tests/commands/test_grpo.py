"""examples/grpo.py: its loss is the formula's, and a model learns what it is rewarded for."""

import argparse
import itertools
import re
import shutil

import grpo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg.models
import jgg.train
from jgg.cli.training.results import AdapterOutput
from tests.support.models import folder_with_tokenizer


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Model(nnx.Module):
    """Its losses are given, those without adapters are others."""

    def __init__(self, losses, of_reference):
        self.own, self.of_reference = nnx.Param(jnp.asarray(losses)), nnx.Param(jnp.asarray(of_reference))

    def losses(self, tokens, targets, *, mask, topk_indices=None, adapters=True):
        assert tokens.shape == targets.shape == mask.shape
        return self.own[...] if adapters else self.of_reference[...]


def test_the_loss_is_that_of_the_formula():
    rng, shape = np.random.default_rng(0), (5, 7)
    losses, of_reference, of_sampler = (rng.uniform(0, 2, shape).astype(np.float32) for _ in range(3))
    is_new = rng.random(shape) < 0.6
    advantages = rng.standard_normal((5, 1)).astype(np.float32)
    part = {
        "tokens": np.zeros(shape, np.int32),
        "targets": np.zeros(shape, np.int32),
        "mask": np.ones(shape, bool),
        "log_probabilities": -of_sampler,
        "advantages": advantages,
        "weights": (is_new / is_new.sum()).astype(np.float32),
        "place": np.array([0, 2], np.float32),
    }
    options = argparse.Namespace(clip=(0.2, 0.3), kl=0.1)
    value, differences = grpo.loss_of(options)(Model(losses, of_reference), part)
    ratio, total = np.exp(of_sampler.astype(np.float64) - losses), 0.0
    further = losses.astype(np.float64) - of_reference
    for row, column in np.argwhere(is_new):
        own, advantage = ratio[row, column], advantages[row, 0]
        gain = min(own * advantage, np.clip(own, 0.8, 1.3) * advantage)
        total += -gain + 0.1 * (np.exp(further[row, column]) - further[row, column] - 1)
    np.testing.assert_allclose(value, total / is_new.sum(), rtol=1e-5)
    largest = np.abs(losses - of_sampler)[is_new].max()
    np.testing.assert_allclose(differences, [0, 2 * largest], rtol=1e-6)
    gradient = jax.grad(lambda own: grpo.loss_of(options)(Model(own, of_reference), part)[0])(losses)
    assert np.array_equal(np.asarray(gradient) != 0, is_new)  # the KL term has one where the ratio is out of bounds


def test_advantages_are_those_of_a_problem_s_answers():
    rewards = np.array([[0.0, 1.0, 1.0, 0.0], [0.5, 0.5, 0.5, 0.5], [1.0, 0.0, 0.0, 0.0]])
    advantages = grpo.advantages_of(rewards)
    np.testing.assert_allclose(advantages[:2], [[-1, 1, 1, -1], [0, 0, 0, 0]], atol=1e-3)
    np.testing.assert_allclose(advantages[2], np.array([3, -1, -1, -1]) / np.sqrt(3), atol=1e-3)


def test_problems_have_their_answers():
    rng = np.random.default_rng(0)
    problems = {grpo.new_problem(rng) for _ in range(200)}
    assert len(problems) == 12
    character = {"digits": "7", "letters": "k", "capitals": "K"}
    for problem in problems:
        assert len(problem.prompt) <= grpo.LONGEST_PROMPT
        count, kind = re.fullmatch(r"(\d) (\w+): ", problem.prompt).groups()
        count, right, wrong = int(count), character[kind], character["digits" if kind == "letters" else "letters"]
        assert grpo.reward_of(problem, right * count + "\n") == 1
        assert grpo.reward_of(problem, right * count) == grpo.reward_of(problem, right * count + wrong)
        assert grpo.reward_of(problem, right * count) == pytest.approx(count / (count + 1))
        assert grpo.reward_of(problem, right * (count + 1) + "\n") == pytest.approx(count / (count + 2))
        assert grpo.reward_of(problem, wrong * count + "\n") == pytest.approx(1 / (count + 1))
        assert grpo.reward_of(problem, "\n") == grpo.reward_of(problem, "") == 0


def test_the_rate_rises_and_falls_to_nothing():
    """Else the model unlearns: Adam's steps do not become shorter where only noise is left."""
    options = grpo.parse(["model", "--output", "adapter", "--steps", "20", "--updates", "2"])
    optimizer, parameter = grpo.make_optimizer(options), jnp.zeros(())
    state, steps = optimizer.init(parameter), []
    for _ in range(40):
        update, state = optimizer.update(jnp.ones(()), state, parameter)
        steps.append(abs(float(update)))
    assert steps[0] == pytest.approx(options.learning_rate / 10, rel=1e-3)
    assert max(steps) == pytest.approx(options.learning_rate, rel=1e-3) and np.argmax(steps) == 10
    assert 0 < steps[-1] < options.learning_rate / 50


@pytest.mark.parametrize("steps", ["1", "3", "4"])
def test_a_few_steps_have_a_rate(steps):
    optimizer = grpo.make_optimizer(grpo.parse(["model", "--output", "adapter", "--steps", steps]))
    update, _ = optimizer.update(jnp.ones(()), optimizer.init(jnp.zeros(())), jnp.zeros(()))
    assert abs(float(update)) > 0


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options",
    [
        ["--updates", "3", "--replay", "--kl", "0.001"],
        ["--accumulate", "2", "--batch-invariant"],
    ],
    ids=["replay", "accumulate"],
)
def test_a_model_learns_what_it_is_rewarded_for(options, tmp_path, capsys, monkeypatch):
    folder = folder_with_tokenizer("qwen3_moe", tmp_path / "model")
    monkeypatch.setattr(grpo, "new_problem", lambda rng: grpo.Problem("t5 t6" + " t7" * int(rng.integers(2)), "", 2))
    monkeypatch.setattr(grpo, "reward_of", lambda problem, text: np.mean([word == "t9" for word in text.split()]))
    arguments = [str(folder), "--output", str(tmp_path / "adapter"), "--dtype", "float32", "--learning-rate", "3e-2"]
    sizes = ["--steps", "16", "--problems", "2", "--samples", "16", "--max-new-tokens", "3", "--log-every", "4"]
    grpo.main([*arguments, *sizes, *options])
    told = capsys.readouterr().out
    lines = re.findall(r"step (\d+): reward (\S+), .* differ by up to ([^,]+), ", told)
    # compiling the sampler is no part of a step
    assert len(re.findall(r", \d+\.\d\d s a step, \d+\.\d\d s of it sampling\n", told)) == 4
    assert re.match(r"step 1: .*, \d+\.\d\d s a step, after \d+ s of compiling and sampling\n", told)
    assert [int(step) for step, *_ in lines] == [1, 4, 8, 12, 16]
    rewards, differences = ([float(line[place]) for line in lines] for place in (1, 2))
    assert rewards[0] < 0.1 and rewards[-1] > 0.8
    assert max(differences) < 1e-4  # later updates of a batch differ by more
    model = jgg.models.load(folder, dtype=jnp.float32)
    jgg.models.load_adapter(model, tmp_path / "adapter")
    assert jgg.models.generate(model, [[5, 6]], 2).tolist() == [[9, 9]]


def test_every_report_has_first_updates_alone(capsys):
    """With any number of updates, and where a record has later updates alone."""
    for updates, every in itertools.product((1, 2, 3, 5), (1, 2, 4)):
        ends = [1, *range(every * updates, 8 * updates + 1, every * updates)]
        sampler = argparse.Namespace(told=[])
        for start, end in itertools.pairwise(dict.fromkeys([0, *ends])):
            is_first = np.arange(start, end) % updates == 0
            sampler.told += [(0.5, 0.5, 1.0, 0.1)] * int(is_first.sum())
            record = jgg.train.Record(end, np.where(is_first, 0.25, 9.0), argparse.Namespace(seconds=1.0))
            assert len(grpo.of_first_updates(record, updates)) == is_first.sum() == len(sampler.told)
            grpo.report(record, sampler, updates)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) >= 8 // every and all("differ by up to 0.25, " in line for line in lines)


def test_an_adapter_of_another_run_stays(tmp_path, capsys):
    """As by `jgg finetune`: refused at the start, and not replaced if it comes later."""
    folder, output = folder_with_tokenizer("qwen3_moe", tmp_path / "model"), tmp_path / "adapter"
    for named, reason in ((output, "which has an adapter"), (folder, "which FOLDER reads")):
        output.mkdir(exist_ok=True)
        (output / "adapter_config.json").write_text("another's")
        with pytest.raises(SystemExit) as ended:
            grpo.main([str(folder), "--output", str(named)])
        assert ended.value.code == 2 and capsys.readouterr().err.endswith(f"got {named}, {reason}\n")
    shutil.rmtree(output)
    runs = [(AdapterOutput(output), jgg.models.load(folder, lora_rank=2, rngs=nnx.Rngs(seed))) for seed in range(2)]
    for adapter, _ in runs:
        adapter.check("--output", output)
    own, others = runs
    places = [adapter.write(model) for adapter, model in (own, own, others, others, own)]
    assert [place.name for place in places] == ["adapter", "adapter", "adapter-2", "adapter-2", "adapter"]
    told = f"jgg: {output} was taken while this run went on, so its result is in {output}-2\n"
    assert capsys.readouterr().err == told


WRONG = {
    "--accumulate must divide --problems times --samples": ["--problems", "3", "--samples", "5", "--accumulate", "2"],
    "argument --samples: must be 2 or more, got 1": ["--samples", "1"],
    "argument --clip: must be 0 or more, got -1.0": ["--clip", "0.2", "-1"],
}


@pytest.mark.parametrize("message", WRONG)
def test_options_that_are_wrong_are_named(message, capsys):
    with pytest.raises(SystemExit) as ended:
        grpo.main(["model", "--output", "adapter", *WRONG[message]])
    assert ended.value.code == 2 and message in capsys.readouterr().err
