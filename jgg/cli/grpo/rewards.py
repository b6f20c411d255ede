"""The reward of answers: a function of a Python file, in the form that TRL has, or a built-in one."""

import importlib.util
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jgg.cli.errors import UsageError
from jgg.cli.grpo.prompts import Prompts
from jgg.data.tokenizers import kind_and_text

type Completion = str | Sequence[Mapping[str, str]]
type RewardFunction = Callable[..., Iterable[float]]

_FLOAT = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_NUMBER = re.compile(rf"([-+]?{_FLOAT})(?:\s*/\s*({_FLOAT}))?")
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|(\d)(\d))")
_LEFT_OUT = re.compile(r"\\text\s*\{[^{}]*\}|\\[%,! ]|[%\s]")  # from what is boxed


def exact(completions: Sequence[Completion], answer: Sequence[object], **_: object) -> list[float]:
    """1 where a completion is the answer, up to white space around it."""
    pairs = zip(completions, map(_text_of_answer, answer), strict=True)
    return [float(text_of(own).strip() == wanted) for own, wanted in pairs]


def number(completions: Sequence[Completion], answer: Sequence[object], **_: object) -> list[float]:
    """1 where a completion's result, by `number_in`, equals the answer's."""

    def wanted(own: object) -> float:
        found = number_in(_text_of_answer(own))
        if found is None:
            raise ValueError(f"answer must have a number in each row of the prompts, got {own!r:.80}")
        return found

    results = (number_in(text_of(own)) for own in completions)
    pairs = zip(results, map(wanted, answer), strict=True)
    return [float(own is not None and math.isclose(own, right, rel_tol=1e-9)) for own, right in pairs]


def _text_of_answer(answer: object) -> str:
    """The text of the column "answer" in a row."""
    if answer is None:
        raise ValueError("answer must be in each row of the prompts, got one without")
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)
    if not isinstance(answer, str) and not is_number:
        raise ValueError(f"answer must be a text or a finite number in each row of the prompts, got {answer!r:.80}")
    return (str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)).strip()


def number_in(text: str) -> float | None:
    r"""The number that a text gives as its result: in the last \boxed{}, else after the last ####, else the last one.

    It may be a fraction, 1/2 or \frac{1}{2}, and have commas between thousands; dollar signs are ignored. What is boxed
    must be a number alone.
    """
    text = text.replace("\N{MINUS SIGN}", "-").replace("\\$", "").replace("$", "").replace("{,}", ",")
    text = _FRACTION.sub(lambda found: "/".join(filter(None, found.groups())), text)
    boxed = _BOXED.findall(text)
    if boxed:
        alone = _NUMBER.fullmatch(_LEFT_OUT.sub("", boxed[-1]))
        return _value(alone) if alone else None
    _, mark, after = text.rpartition("####")
    first = _NUMBER.search(after) if mark else None
    return _value(first) if first else next((_value(each) for each in reversed(list(_NUMBER.finditer(text)))), None)


def text_of(completion: Completion) -> str:
    """The text of a completion, which is one of messages where the prompt is."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


class Reward:
    """A reward function and its name, as --reward gives it.

    Args:
      given: "exact", "number", FILE.py or FILE.py:NAME.
      columns: the columns of the prompts, without "prompt".

    Raises: UsageError: there is no such function.
    """

    def __init__(self, given: str, columns: Sequence[str]) -> None:
        self.name = f"--reward {given}"
        built_in: dict[str, RewardFunction] = {"exact": exact, "number": number}
        self._file = None if given in built_in else _file_of(given)
        self._function = built_in[given] if self._file is None else _function_of(*self._file)
        try:
            parameters = inspect.signature(self._function).parameters.values()
        except (TypeError, ValueError) as error:
            raise UsageError(f"{self.name} must be a function of prompts and completions: {error}") from error
        own = {"prompts", "completions", "completion_ids"}
        if taken := own & {*columns}:
            raise UsageError(f"--prompts must have no column {min(taken)}, which the reward gets otherwise, got one")
        known = own | {*columns}
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if by_place := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
            raise UsageError(f"{self.name} must take all arguments by name, got {by_place[0]} before /")
        self._needed = {p.name for p in named if p.default is p.empty} - own
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = known if takes_all else known & {p.name for p in named}

    def check_rows(self, option: str, prompts: Prompts) -> None:
        """Raises UsageError if an option's prompts lack a column that the function needs, or a built-in one an answer.

        A function of a file gets None where a row lacks a column that others have.
        """
        if missing := self._needed - {*prompts.columns}:
            got = ", ".join(sorted(prompts.columns)) or "none"
            raise UsageError(f"{self.name} needs the column {min(missing)} of {option}, which have {got}")
        if self._file is None:
            answers = [prompt.row.get("answer") for prompt in prompts.prompts]
            try:
                self._function(completions=[""] * len(answers), answer=answers)
            except ValueError as error:
                raise UsageError(f"{self.name} with {option}: {error}") from error

    def __call__(self, arguments: Mapping[str, Sequence[object]]) -> np.ndarray:
        """The rewards of answers, float64 [answers]; ends the process in one line where the function is wrong.

        Args:
          arguments: "prompts", "completions", "completion_ids" and the columns, of each answer.
        """
        count = len(arguments["completions"])
        try:
            found = self._function(**{name: arguments[name] for name in self._names})
            rewards = list(found) if isinstance(found, Iterable) and not isinstance(found, str | dict) else None
        except (Exception, SystemExit) as error:  # of any type: it is a program
            raise SystemExit(f"jgg: {self.name} fails{self._line_of(error)}: {kind_and_text(error)}") from error
        expected = f"jgg: {self.name} must return a list of {count} numbers"
        if rewards is None:
            raise SystemExit(f"{expected}, got {type(found).__name__} {found!r:.80}")
        if len(rewards) != count:
            raise SystemExit(f"{expected}, one for each completion, got {len(rewards)}")
        return np.array([_finite(each, place, expected) for place, each in enumerate(rewards)])

    def _line_of(self, error: BaseException) -> str:
        """Where in the file an error was raised."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame.lineno for frame in frames if self._file and frame.filename == str(self._file[0])]
        return f" in line {own[-1]}" if own else ""


def _finite(value: float, place: int, expected: str) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise SystemExit(f"{expected} that are finite, got {value!r:.80} as number {place + 1}")
    return number


def _file_of(given: str) -> tuple[Path, str]:
    """The file, and the name of the function in it."""
    path, _, name = given.rpartition(":") if not given.endswith(".py") else (given, "", "reward")
    if not path.endswith(".py") or not name.isidentifier():
        raise UsageError(f"--reward must be exact, number, FILE.py or FILE.py:NAME, got {given}")
    return Path(path).absolute(), name


def _function_of(path: Path, name: str) -> RewardFunction:
    """Runs a file, and returns its function of a name."""
    spec = importlib.util.spec_from_file_location(f"_jgg_reward_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"--reward must be a file that can be read, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look there
    sys.path.insert(0, str(path.parent))  # of what it imports, as for a program
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # of any type: it is a program
        raise UsageError(f"--reward {path} cannot be imported: {kind_and_text(error)}") from error
    function: RewardFunction | None = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise UsageError(f"--reward {path} must have a function {name}, got {', '.join(own) or 'none'}")
    return function


def _value(found: re.Match[str]) -> float | None:
    """The finite number that was found, or None."""
    numerator, denominator = (float(each.replace(",", "")) for each in (found[1], found[2] or "1"))
    value = numerator / denominator if denominator else math.inf
    return value if math.isfinite(value) else None
