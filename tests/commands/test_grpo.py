"""`jgg grpo`: what it learns, measures and refuses, and that a run goes on as if it was not stopped."""

import json
import math
import re
import shutil
from pathlib import Path

import grpo as example
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg.models
from jgg.cli import main
from jgg.cli.errors import UsageError
from jgg.cli.grpo.prompts import read_prompts
from jgg.cli.grpo.rewards import Reward, exact, number, number_in
from jgg.cli.grpo.rollouts import Answers
from jgg.models.rollouts import TrainingRows
from tests.support.models import config_of, folder_with_tokenizer


@pytest.fixture(autouse=True)
def promotion():
    """Users have not forbidden it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


REWARD = """
def reward(prompts, completions, answer, **columns):
    assert len(prompts) == len(answer) == len(columns["completion_ids"]) == len(completions)
    return [sum(word in wanted.split() for word in text.split()) / 3 for text, wanted in zip(completions, answer)]
"""
RIGHT = range(9, 25)  # tokens
ROWS = [
    {"prompt": prompt, "answer": " ".join(f"t{token}" for token in RIGHT)}
    for prompt in ("t5 t6", "t5 t6 t7", "t8", "t10 t11")
]


def write(name, rows):
    with open(name, "w") as file:
        file.write("\n".join(map(json.dumps, rows)) + "\n")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model's folder, prompts and a reward function in the working folder."""
    monkeypatch.chdir(tmp_path)
    write("prompts.jsonl", ROWS)
    Path("reward.py").write_text(REWARD)
    return folder_with_tokenizer("qwen3_moe", tmp_path / "model")


GIVEN = "--prompts", "prompts.jsonl", "--reward", "reward.py", "--log-every", 1, "--problems", 2, "--samples", 8
GIVEN += "--max-new-tokens", 3, "--dtype", "float32", "--lora-rank", 2, "--remat", "none"


def run(*arguments):
    """Runs the command; the lines of its log."""
    values = [*map(str, [*GIVEN, *arguments])]
    assert main(["grpo", "model", *values]) == 0
    with open(f"{values[values.index('--output') + 1]}.jsonl") as file:
        return [json.loads(line) for line in file]


TIMES = "sampling_seconds", "learning_seconds", "tokens_per_second"


def without_times(lines):
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


@pytest.mark.thorough
def test_a_model_learns_what_it_is_rewarded_for_and_goes_on_from_a_checkpoint(folder, capsys):
    options = "--steps", 14, "--learning-rate", 3e-2, "--kl", 1e-3, "--replay", "--checkpoints"
    options += "run", "--eval-prompts", "prompts.jsonl", "--eval-every", 7, "--save-every", 7
    lines = run(*options, "--output", "out")
    rewards, differences = ([line[name] for line in lines] for name in ("reward", "largest_difference"))
    assert [line["step"] for line in lines] == list(range(1, 15))
    assert np.mean(rewards[:2]) < 0.5 and np.mean(rewards[-2:]) > 0.9 and max(differences) < 1e-4
    assert [line["step"] for line in lines if "eval_reward" in line] == [7, 14]
    assert lines[-1]["eval_reward"] > 0.9 and lines[-1]["answer_tokens"] == 3 and lines[-1]["cut_answers"] == 1
    assert lines[0]["entropy"] > lines[-1]["entropy"] > 0 and lines[-1]["kl"] > lines[0]["kl"] == pytest.approx(0)
    assert lines[-1]["epoch"] == 7 and all(line["sampling_seconds"] > 0 for line in lines)
    told = capsys.readouterr().out
    assert told.startswith("4 prompts of at most 3 tokens, for 14 steps\n") and told.endswith("wrote out\n")
    model = jgg.models.load(folder, dtype=jnp.float32)
    jgg.models.load_adapter(model, "out")
    assert set(jgg.models.generate(model, [[5, 6]], 2)[0].tolist()) <= {*RIGHT}
    # from the checkpoint of step 7 the run goes on as it was, by the file of its options
    adapter = Path("out/adapter_model.safetensors").read_bytes()
    shutil.rmtree("run/14")
    assert main(["grpo", "--config", "out.toml", "--quiet"]) == 0
    assert without_times(map(json.loads, Path("out.jsonl").read_text().splitlines())) == without_times(lines)
    assert Path("out/adapter_model.safetensors").read_bytes() == adapter
    assert not capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["grpo", "--config", "out.toml", "--samples", "4"])
    assert "run has a run with other options: samples is 4, was 8" in capsys.readouterr().err


@pytest.mark.sweep
@pytest.mark.usefixtures("folder")
def test_all_parameters_learn_by_other_variants():
    options = "--full", "--steps", 16, "--learning-rate", 3e-2, "--updates", 2, "--accumulate", 4, "--temperature", 1.2
    options += "--aggregation", "constant", "--scale-rewards", "none", "--delta", 4, "--clip", 0.2, 0.3
    lines = run(*options, "--dynamic-sampling", 2, "--output", "out")
    assert np.mean([line["reward"] for line in lines[-4:]]) > 0.7 and lines[0]["reward"] < 0.5
    firsts = [line.get("largest_difference") for line in lines]
    # the second step of a batch has no difference of its own
    assert all((own is None) == bool(place % 2) and (own or 0) < 1e-4 for place, own in enumerate(firsts))
    assert max(line["clipped"] for line in lines) > 0


@pytest.mark.sweep
@pytest.mark.usefixtures("folder")
def test_all_parameters_learn_in_the_backward_pass():
    options = "--full", "--optimizer-in-backward", "--remat", "all", "--steps", 16, "--learning-rate", 3e-2
    lines = run(*options, "--output", "out")
    assert np.mean([line["reward"] for line in lines[-4:]]) > lines[0]["reward"] + 0.2
    assert all(line["largest_difference"] < 1e-4 for line in lines)


def answers(rewards, first):
    """Answers to prompts, whose rows have numbers of their own."""
    rewards = np.array(rewards)
    numbers = first + np.arange(rewards.size)
    fields = [np.repeat(numbers[:, None], 3, axis=1) for _ in TrainingRows._fields[:-1]]
    choices = np.broadcast_to(numbers[:, None, None, None], (rewards.size, 2, 3, 1))
    return Answers(TrainingRows(*fields, choices), rewards, numbers.reshape(rewards.shape), rewards > 5)


def test_prompts_that_teach_nothing_are_replaced():
    own, other = answers([[1, 1], [0, 1], [2, 2]], 0), answers([[3, 4], [0, 0], [5, 6]], 10)
    assert own.is_equal.tolist() == [True, False, True] and other.is_equal.tolist() == [False, True, False]
    new = own.replaced(np.array([0, 2]), other, np.array([0, 2]))
    assert new.rewards.tolist() == [[3, 4], [0, 1], [5, 6]]
    wanted = [10, 11, 2, 3, 14, 15]
    assert new.lengths.ravel().tolist() == wanted and new.rows.tokens[:, 0].tolist() == wanted
    assert new.rows.topk_indices[:, 1, 2, 0].tolist() == wanted and own.rows.tokens[0, 0] == 0


NUMBERS = {
    "It is 12, or rather 13.": 13,
    "#### 1,234\n": 1234,
    "so 7 + 8 = 15\n#### $15.00 in 2 days": 15,
    r"\boxed{42} of 100": 42,
    r"#### 3 or \boxed{\$1{,}234.5}": 1234.5,
    r"\boxed{5\text{ apples}}": 5,
    r"\boxed{\frac{1}{2}} is 2": 0.5,
    r"\boxed{x} is 2": None,
    "it is \N{MINUS SIGN}5": -5,
    "-$1,000": -1000,
    "3/2": 1.5,
    "3,4": 4,
    "1e400": None,
    r"first \boxed{1}, then \boxed{-2}": -2,
    "#### none, but 8 before no mark": 8,
    "no number": None,
    ".5": 0.5,
    "1e3": 1000,
}


@pytest.mark.parametrize("text", NUMBERS)
def test_the_number_of_an_answer(text):
    assert number_in(text) == NUMBERS[text]


def test_rewards_that_can_be_verified():
    chat = [[{"role": "assistant", "content": " Paris\n"}], "paris"]
    assert exact(prompts=chat, completions=chat, answer=["Paris", "Paris"]) == [1, 0]
    texts = ["18", "#### 18.0", r"\boxed{17}", "none", "0.1"]
    assert number(completions=texts, answer=["9 * 2 = <<9*2=18>>18\n#### 18", 18, 18, 18, "1"]) == [1, 1, 0, 0, 0]
    for wrong in ("abc", None):
        with pytest.raises(ValueError, match=r"answer must (have a number|be) in each row"):
            number(completions=["1"], answer=[wrong])
    with pytest.raises(UsageError, match="--prompts must have no column completions"):
        Reward("exact", ["answer", "completions"])
    assert Reward("number", ["answer"])(ARGUMENTS | {"completions": ["2"] * 3}).tolist() == [0, 1, 0]


ARGUMENTS = {"prompts": ["p"] * 3, "completions": ["a"] * 3, "completion_ids": [[1]] * 3, "answer": [1, 2, 3]}
BODIES = {  # what a function returns, and how it is told
    "[1, 2]": "must return a list of 3 numbers, one for each completion, got 2",
    "[1, None, 3]": "must return a list of 3 numbers that are finite, got None as number 2",
    "[1, 2, float('nan')]": "must return a list of 3 numbers that are finite, got nan as number 3",
    "['1', 2, 3]": "must return a list of 3 numbers that are finite, got '1' as number 1",
    "None": "must return a list of 3 numbers, got NoneType None",
    "'abc'": "must return a list of 3 numbers, got str 'abc'",
    "1 / 0": "fails in line 2: ZeroDivisionError: division by zero",
    "(1 / x for x in (1, 0, 1))": "fails in line 2: ZeroDivisionError: division by zero",
    "prompts['x']": "fails in line 2: TypeError: list indices must be integers or slices, not str",
}


@pytest.mark.parametrize("body", BODIES)
def test_a_wrong_result_of_a_reward_function_is_one_line(body, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(f"def reward(prompts, completions, **_):\n    return {body}\n")
    with pytest.raises(SystemExit) as ended:
        Reward(str(path), ["answer"])(ARGUMENTS)
    assert ended.value.code == f"jgg: --reward {path} {BODIES[body]}"


FILES = {  # what a file has, and how it is told
    "def reward(:": "cannot be imported: SyntaxError: invalid syntax (own.py, line 1)",
    "import nothing_of_this_name": "cannot be imported: ModuleNotFoundError: No module named 'nothing_of_this_name'",
    "def score(completions): ...": "must have a function reward, got score",
    "reward = 1": "must have a function reward, got none",
    "def reward(prompts, completions, /): ...": "must take all arguments by name, got prompts before /",
}


@pytest.mark.parametrize("text", FILES)
def test_a_wrong_file_of_a_reward_function_is_one_line(text, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=f"^--reward {re.escape(f'{path} {FILES[text]}')}$"):
        Reward(str(path), ["answer"])


def test_a_reward_function_gets_what_it_has_arguments_for(tmp_path):
    (tmp_path / "helper.py").write_text("WORTH = 2.5")
    path = tmp_path / "own.py"
    path.write_text("import helper\ndef worth(completions, answer): return (helper.WORTH * x for x in answer)")
    assert Reward(f"{path}:worth", ["answer"])(ARGUMENTS).tolist() == [2.5, 5, 7.5]
    for name in ("none.py", "own.txt", "some", "own.py:a-b"):
        with pytest.raises(UsageError, match="--reward must be"):
            Reward(name, [])


@pytest.fixture
def error(folder, monkeypatch, capsys):
    """Runs the command until it ends, before there is a model; its one line."""

    def make(*_, **__):
        raise AssertionError("the model is made")

    monkeypatch.setattr(jgg.models, "load", make)

    def ended(*arguments):
        given = dict(zip(*[iter(("--prompts", "prompts.jsonl", "--reward", "reward.py", *arguments))] * 2, strict=True))
        with pytest.raises(SystemExit):
            main(["grpo", "model", "--output", "out", *(text for pair in given.items() for text in pair)])
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("jgg grpo: error: ") and not Path("out").exists()
        return line

    return ended


WRONG = {
    "--accumulate must divide --problems times --samples, 256, got 3": ["--accumulate", "3"],
    "argument --samples: must be 2 or more, got 1": ["--samples", "1"],
    "--delta must be above 1 + HIGH of --clip, 1.28, got 1.2": ["--delta", "1.2"],
    "--rows must be at least --samples, 16, got 8": ["--rows", "8"],
    "--cache-dtype must be left out with --batch-invariant": ["--cache-dtype", "float8_e4m3fn", "--config", "own.toml"],
    "argument --kl: must be 0 or more and finite, got -1.0": ["--kl", "-1"],
    "argument --temperature: must be greater than 0 and finite, got 0.0": ["--temperature", "0"],
    "--reward must be exact, number, FILE.py or FILE.py:NAME, got best": ["--reward", "best"],
    'held.jsonl:1: "prompt" must be a text or a list of messages with roles, got {"text": "t5"}': [
        *("--eval-prompts", "held.jsonl")
    ],
    '"prompt" must have tokens, got ""': ["--prompts", "empty.jsonl"],
    "a conversation needs chat_template.jinja": ["--prompts", "chat.jsonl"],
    "argument --max-prompt-tokens: must be 1 or more, got 0": ["--max-prompt-tokens", "0"],
    "--reward solution.py needs the column solution of --prompts, which have answer": [
        *("--reward", "solution.py", "--prompts", "answered.jsonl"),
    ],
    "--reward exact needs the column answer of --eval-prompts, which have none": [
        *("--reward", "exact", "--prompts", "answered.jsonl", "--eval-prompts", "bare.jsonl"),
    ],
    "--reward exact with --prompts: answer must be in each row of the prompts, got one without": [
        *("--reward", "exact", "--prompts", "some.jsonl"),
    ],
    "--eval-prompts: answer must be a text or a finite number in each row of the prompts, got ['t6']": [
        *("--reward", "exact", "--prompts", "answered.jsonl", "--eval-prompts", "lists.jsonl"),
    ],
    "--reward number with --prompts: answer must have a number in each row of the prompts, got 'six'": [
        *("--reward", "number", "--prompts", "words.jsonl"),
    ],
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_named_before_there_is_a_model(message, error):
    write("held.jsonl", [{"text": "t5"}])
    write("empty.jsonl", [{"prompt": ""}])
    write("answered.jsonl", [{"prompt": "t5", "answer": "t6"}])
    write("some.jsonl", [{"prompt": "t5", "answer": "t6"}, {"prompt": "t5"}])
    write("words.jsonl", [{"prompt": "t5", "answer": "six"}])
    write("bare.jsonl", [{"prompt": "t5"}])
    write("lists.jsonl", [{"prompt": "t5", "answer": ["t6"]}])
    Path("solution.py").write_text("def reward(completions, solution): ...")
    Path("own.toml").write_text("batch_invariant = true\n")
    write("chat.jsonl", [{"prompt": [{"role": "user", "content": "t5"}]}])
    assert message in error(*WRONG[message])


def test_options_need_each_other(error, folder):
    Path("own.toml").write_text("full = true\nkl = 0.1\nclip = [0.1, 0.2]\n")
    assert "--kl needs adapters: with --full there is no model without them" in error("--config", "own.toml")
    write("long.jsonl", [{"prompt": "t5 " * 9}])
    message = error("--prompts", "long.jsonl", "--max-prompt-tokens", "4")
    assert (
        "--prompts long.jsonl must have a prompt of at most --max-prompt-tokens 4 tokens, got 1 longer one" in message
    )
    (folder / "config.json").write_text(json.dumps(config_of("qwen3_moe") | {"vocab_size": 10}))
    assert "prompts.jsonl:4 must have tokens below the model's vocab_size, 10, got 11" in error()


def test_prompts_of_files_and_of_chats(folder, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}t3")
    chat = [{"role": "user", "content": "t5"}, {"role": "user", "content": "t6"}]
    write("mixed.jsonl", [*ROWS, {"prompt": chat, "level": 2}, {"prompt": "t5 t5 t5 t5"}])
    table = pa.table({"prompt": ["t7"], "text": ["x"], "answer": ["t9"]})
    pq.write_table(table, "more.parquet")
    tokenizer, config = jgg.data.load_tokenizer(folder), jgg.models.model_config(config_of("qwen3_moe"))
    files = [tmp_path / "mixed.jsonl", tmp_path / "more.parquet"]
    found = read_prompts("--prompts", files, tokenizer, config, 3, None)
    assert [prompt.ids for prompt in found.prompts] == [[5, 6], [5, 6, 7], [8], [10, 11], [5, 6, 3], [7]]
    assert found.columns == ["answer", "level", "text"] and found.num_left_out == 1 and found.longest == 3
    assert found.prompts[-1].row == {"prompt": "t7", "text": "x", "answer": "t9"}
    batches = [found.of_batch(number, 4, 5) for number in range(3)]
    ids = [tuple(prompt.ids) for batch in batches for prompt in batch]
    assert len(set(ids[:6])) == len(set(ids[6:])) == 6 and ids[:6] != ids[6:]


def test_problems_of_the_example_have_their_answers():
    rng = np.random.default_rng(0)
    problems = {prompt: wanted for prompt, wanted in (example.new_problem(rng) for _ in range(200))}
    assert len(problems) == 12
    character = {"digits": "7", "letters": "k", "capitals": "K"}
    for prompt, wanted in problems.items():
        assert len(prompt) <= example.LONGEST
        count, kind = re.fullmatch(r"(\d) (\w+): ", prompt).groups()
        count, right, wrong = int(count), character[kind], character["digits" if kind == "letters" else "letters"]
        assert example.reward_of(wanted, right * count + "\n") == 1
        assert example.reward_of(wanted, right * count) == example.reward_of(wanted, right * count + wrong)
        assert example.reward_of(wanted, right * (count + 1) + "\n") == pytest.approx(count / (count + 2))
        assert example.reward_of(wanted, wrong * count + "\n") == pytest.approx(1 / (count + 1))
        assert example.reward_of(wanted, "") == 0


@pytest.mark.sweep
def test_the_example_teaches(folder, capsys, monkeypatch):
    monkeypatch.setattr(example, "new_problem", lambda rng: ("t5 t6" + " t7" * int(rng.integers(2)), []))
    monkeypatch.setattr(example, "reward_of", lambda wanted, text: np.mean([word == "t9" for word in text.split()]))
    monkeypatch.setattr(example, "PROBLEMS", 2)
    monkeypatch.setattr(example, "NEW_TOKENS", 3)
    example.train(folder, "adapter", 20, "float32", rate=3e-2)
    told = re.findall(r"step (\d+): reward (\S+), .* differ by up to (\S+)\n", capsys.readouterr().out)
    assert [int(step) for step, *_ in told] == [1, 10, 20]
    assert float(told[0][1]) < 0.1 and float(told[-1][1]) > 0.6 and max(float(own) for *_, own in told) < 1e-4
    assert Path("adapter/adapter_config.json").is_file() and not math.isnan(float(told[-1][1]))
