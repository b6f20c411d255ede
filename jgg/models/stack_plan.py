"""Which layers of a decoder are stacked, and in which order stacks run, so that a scan compiles few layers."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jgg.core.mixers import MixerConfig, RotaryConfig

_LONGEST = 16  # layers of a period


@dataclasses.dataclass(frozen=True)
class StackPlan:
    """Layers with the same shapes: a decoder stacks their parameters, with the layer as the first axis.

    Attributes:
      name: the attribute of a `Decoder` that has them.
      numbers: the layers' numbers, in order.
      mixers: of each of them, what mixes the tokens of a sequence. They differ at most in window and rotary embedding.
        There are at most two kinds: with a window, and without.
      is_dense: whether they have an MLP instead of experts.
    """

    name: str
    numbers: tuple[int, ...]
    mixers: tuple[MixerConfig, ...]
    is_dense: bool

    @property
    def count(self) -> int:
        """The number of layers."""
        return len(self.numbers)

    @property
    def mixer(self) -> MixerConfig:
        """The mixer of the first layer, which has the shapes and options of all of them."""
        return self.mixers[0]

    @property
    def window(self) -> int | None:
        """The size of the windows; None if no layer has one."""
        return next((mixer.window for mixer in self.mixers if mixer.window is not None), None)

    @property
    def has_window(self) -> tuple[bool, ...] | None:
        """For each layer, whether it has a window; None if all do or none does."""
        found = tuple(mixer.window is not None for mixer in self.mixers)
        return None if len(set(found)) == 1 else found

    @property
    def rotaries(self) -> tuple[RotaryConfig | None, RotaryConfig | None]:
        """The rotary embeddings of layers with a window, and of layers without; one twice if there is one kind only."""
        own = {mixer.window is not None: mixer.rotary for mixer in self.mixers}
        first = self.mixer.rotary
        return own.get(True, first), own.get(False, first)


class Period(NamedTuple):
    """Layers that run in sequence, and are then all repeated with the stacks' next parameters.

    Attributes:
      names: the stacks' names, in the order their layers run. A stack may occur more than once.
      repeats: how many times they run.
    """

    names: tuple[str, ...]
    repeats: int


def plan_of(mixers: Sequence[MixerConfig], is_dense: Sequence[bool]) -> tuple[StackPlan, ...]:
    """The stacks of layers with these mixers, in the order of their first layers.

    Layers with experts are in "layers", dense ones in "dense_layers". Where shapes or options differ, further stacks
    have the number of their first layer in their names, such as "layers_3".
    """
    kinds = list(zip((mixer.without_place() for mixer in mixers), is_dense, strict=True))
    variants: dict[object, set[MixerConfig]] = {}
    for own, kind in zip(mixers, kinds, strict=True):
        variants.setdefault(kind, set()).add(own)
    layers: dict[object, list[int]] = {}
    for number, kind in enumerate(kinds):
        key = kind if _share_a_stack(variants[kind]) else (mixers[number], is_dense[number])
        layers.setdefault(key, []).append(number)
    stacks: dict[str, StackPlan] = {}
    for numbers in layers.values():
        first = numbers[0]
        name = "dense_layers" if is_dense[first] else "layers"
        name = f"{name}_{first}" if name in stacks else name
        of_stack = tuple(mixers[number] for number in numbers)
        stacks[name] = StackPlan(name, tuple(numbers), of_stack, is_dense[first])
    return tuple(stacks.values())


def _share_a_stack(variants: set[MixerConfig]) -> bool:
    """Whether a layer can choose among these mixers by whether it has the window."""
    pairs = {None if own.rotary is None else len(own.rotary.frequencies) for own in variants}
    return len({own.window is not None for own in variants}) == len(variants) and len(pairs) == 1


def schedule_of(names: Sequence[str]) -> tuple[Period, ...]:
    """The periods to run the layers of these stacks in, chosen so that the fewest layers are compiled.

    For example, "a b b b a b b b" is the period "a b b b" twice, and "a b b b" is "a" once and "b" three times.
    """
    best: list[tuple[int, tuple[Period, ...]]] = [(0, ())]  # for the first layers: how many are compiled, and how
    matches = [0] * (_LONGEST + 1)  # by size: how many of the last layers are those of as many before
    for end in range(1, len(names) + 1):
        ways = []
        for size in range(1, min(_LONGEST, end) + 1):
            is_match = end > size and names[end - 1] == names[end - 1 - size]
            matches[size] = matches[size] + 1 if is_match else 0
            for repeats in {1, matches[size] // size + 1}:
                cost, periods = best[end - size * repeats]
                ways.append((cost + size, (*periods, Period(tuple(names[end - size : end]), repeats))))
        best.append(min(ways, key=lambda way: (way[0], len(way[1]))))
    return best[-1][1]
