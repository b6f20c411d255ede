"""The LoRA adapters of experts in PEFT's file: tensor names, and conversion to low-rank terms and back."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from jgg.core.arguments import check
from jgg.hf.adapter_settings import AdapterSettings
from jgg.hf.family import Family
from jgg.hf.files import check_names, check_shape
from jgg.linear.low_rank import LowRank

PREFIX = "base_model.model."
FUSED = {"w_gate_up": "gate_up_proj", "w_down": "down_proj"}  # in the order in which PEFT wraps them


def pair_of(place: str) -> tuple[str, str]:
    """The names of the two tensors of a module's adapter."""
    return f"{PREFIX}{place}.lora_A.weight", f"{PREFIX}{place}.lora_B.weight"


def names_of(module: str) -> set[str]:
    """The names of all tensors that a module's adapter may have."""
    return {*pair_of(module)}


def places(own: Family, layer: int, targeted: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields each parameter with the module that holds its adapter: PEFT wraps the experts once per parameter."""
    for index, param in enumerate(targeted, 1):
        yield param, own.fused_name(layer) + ".base_layer" * (len(targeted) - index)


def names_of_parameters(own: Family, layer: int) -> dict[str, str]:
    """The names of a layer's fused parameters in transformers 5."""
    return {param: f"{own.fused_name(layer)}.{name}" for param, name in FUSED.items()}


def pattern_of_experts(own: Family) -> re.Pattern[str]:
    """A pattern for how names of experts' tensors begin in PEFT's file; its group is the layer's index."""
    blocks = {f"{block}." if block else "" for block in (own.block, own.fused_block or own.block)}
    modules = (name.partition(".{e}")[0] for param in FUSED for name in own.tensors[param].names)
    roots = {name.removesuffix(".weight") for name in modules}
    roots.add(own.fused_name(0).removeprefix(own.fused_block_name(0)))
    choices = (f"(?:{'|'.join(map(re.escape, sorted(names)))})" for names in (blocks, roots))
    return re.compile(re.escape(f"{PREFIX}{own.prefix}layers.") + r"(\d+)\." + "".join(choices) + r"\.")


@dataclasses.dataclass(frozen=True)
class ExpertsReader:
    """Reads the experts' terms layer by layer.

    Attributes:
      tensors: the tensors of experts by their names in PEFT's file.
      where: the tensors' file, for messages.
      is_expert_slowest: whether the expert varies slowest along the columns of a fused parameter's lora_B.
      parameters, modules: the fused parameters and expert modules that were read.
    """

    own: Family
    shapes: Mapping[str, tuple[int, ...]]
    settings: AdapterSettings
    tensors: Mapping[str, np.ndarray]
    where: str
    is_expert_slowest: bool = False
    parameters: list[str] = dataclasses.field(default_factory=list)
    modules: list[str] = dataclasses.field(default_factory=list)

    def read(self, present: set[str], layer: int) -> dict[str, LowRank]:
        """Returns the terms of a layer from the tensors with these names."""
        fused = re.compile(re.escape(PREFIX + self.own.fused_name(layer)) + r"\.(base_layer\.)*lora_")
        read = self._of_parameters if any(map(fused.match, present)) else self._of_modules
        return read(present, layer)

    def _check_names(self, present: set[str], expected: set[str], layer: int) -> None:
        check_names(present, expected, f"among the experts' tensors of layer {layer} in {self.where}")

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        check_shape(f"{name} of {self.where}", self.tensors[name], shape)

    def _of_parameters(self, present: set[str], layer: int) -> dict[str, LowRank]:
        names = names_of_parameters(self.own, layer)
        targeted = [param for param, name in names.items() if self.settings.targets_parameter(name)]
        by_param = dict(places(self.own, layer, targeted))
        self._check_names(present, {name for place in by_param.values() for name in pair_of(place)}, layer)
        self.parameters.extend(names[param] for param in targeted)
        return {param: self._of_parameter(param, by_param[param], names[param]) for param in targeted}

    def _of_parameter(self, param: str, place: str, name: str) -> LowRank:
        experts, rows, columns = self.shapes[param]
        inner, outer = (columns, rows) if self.own.is_swapped else (rows, columns)
        rank = self.settings.rank(name)
        of_a, of_b = pair_of(place)
        self._check_shape(of_a, (experts * rank, inner))
        self._check_shape(of_b, (outer, rank * experts))
        # A has the expert slowest, B the expert fastest
        a = self.tensors[of_a].reshape(experts, rank, inner)
        if self.is_expert_slowest:
            b = self.tensors[of_b].reshape(outer, experts, rank).transpose(1, 2, 0)
        else:
            b = self.tensors[of_b].reshape(outer, rank, experts).transpose(2, 1, 0)
        if self.own.is_swapped:
            a, b = b, a
        return LowRank(a.swapaxes(1, 2), b, self.settings.scale(name, rank))

    def _of_modules(self, present: set[str], layer: int) -> dict[str, LowRank]:
        block, expected = self.own.block_name(layer), set[str]()
        found: dict[str, list[list[str] | None]] = {}  # the modules of all experts of each of a parameter's parts
        for param in FUSED:
            for part in self.own.tensors[param].names:
                if "{e}" in part:
                    name = block + part.removesuffix(".weight")
                    modules = [name.replace("{e}", str(expert)) for expert in range(self.shapes[param][0])]
                    own = set[str]().union(*map(names_of, modules))
                    expected |= own if own & present else set()
                    found.setdefault(param, []).append(modules if own & present else None)
        self._check_names(present, expected, layer)
        terms: dict[str, LowRank] = {}
        for param, parts in found.items():
            if any(parts):
                shape = (*self.shapes[param][:-1], self.shapes[param][-1] // len(parts))
                terms[param] = side_by_side([self._of_part(part, shape) if part else None for part in parts], shape[-1])
        return terms

    def _of_part(self, modules: list[str], shape: tuple[int, ...]) -> LowRank:
        """Returns the term of one part of a parameter, such as gate, whose shape is [E, rows, columns]."""
        ranks = {self.settings.rank(module) for module in modules}
        scales = {self.settings.scale(module, rank) for rank in ranks for module in modules}
        check(
            len(ranks) == len(scales) == 1,
            f"{modules[0]} and the same module of all other experts must have one rank and one lora_alpha in "
            f"{self.settings.where}, got ranks {sorted(ranks)} and scales {sorted(scales)}.",
        )
        (rank,), (scale,) = ranks, scales
        terms = [read_term(self.tensors, module, shape[1:], rank, scale, self.where) for module in modules]
        self.modules.extend(modules)
        return jax.tree.map(lambda *parts: np.stack(parts), *terms)


def read_term(
    tensors: Mapping[str, np.ndarray], module: str, shape: Sequence[int], rank: int, scale: float, where: str
) -> LowRank:
    """The term of one module's matrix [K, N]; raises if a tensor is missing or has a wrong shape."""
    of_a, of_b = pair_of(module)
    for name, wanted in ((of_a, (rank, shape[0])), (of_b, (shape[1], rank))):
        check(name in tensors, f"{name} is missing in {where}.")
        check_shape(f"{name} of {where}", tensors[name], wanted)
    return LowRank(tensors[of_a].T, tensors[of_b].T, scale)


def joined(parts: Sequence[LowRank | None], width: int) -> LowRank:
    """One term for a matrix that joins several modules; if they all have the same a, the term uses it."""
    first = parts[0]
    if first is not None and all(
        part is not None and part.scale == first.scale and np.array_equal(part.a, first.a) for part in parts
    ):
        return LowRank(first.a, np.concatenate([part.b for part in parts if part is not None], axis=1), first.scale)
    return side_by_side(parts, width)


def side_by_side(parts: Sequence[LowRank | None], width: int) -> LowRank:
    """One term for a matrix that joins the columns of several modules, where some modules have a term.

    Args:
      parts: for each module a term of a [.., K, r] and b [.., r, width], or None. At least one is a term.

    Returns: a term whose a has the parts' a side by side, and whose b is zero outside each part's block. The scale is
      the first term's; the b of a term with another scale is multiplied by the ratio of the two.
    """
    terms = [part for part in parts if part is not None]
    first, a = terms[0], np.concatenate([term.a for term in terms], axis=-1)
    b = np.zeros((*a.shape[:-2], a.shape[-1], len(parts) * width), np.result_type(*[term.b for term in terms]))
    row = 0
    for index, part in enumerate(parts):
        if part is not None:
            rank = part.a.shape[-1]
            b[..., row : row + rank, index * width : (index + 1) * width] = rescaled(part, first.scale).b
            row += rank
    return LowRank(a, b, first.scale)


def rescaled(term: LowRank, scale: float) -> LowRank:
    """The same term with another scale; b is changed to match."""
    if term.scale == scale:
        return term
    b = np.asarray(term.b)
    return LowRank(term.a, (b * np.float64(term.scale / scale)).astype(b.dtype), scale)


def padded(term: LowRank, rank: int) -> LowRank:
    """The same term, padded with zeros to a larger rank."""
    missing = rank - term.a.shape[-1]
    a, b = np.asarray(term.a), np.asarray(term.b)
    around = [(0, 0)] * (a.ndim - 2)
    return LowRank(np.pad(a, [*around, (0, 0), (0, missing)]), np.pad(b, [*around, (0, missing), (0, 0)]), term.scale)


def flat(low_rank: LowRank, is_swapped: bool) -> Iterator[np.ndarray]:
    """Yields lora_A and lora_B of a fused parameter: the expert varies slowest in A and fastest in B."""
    a, b = np.asarray(low_rank.a).swapaxes(1, 2), np.asarray(low_rank.b)  # both [E, r, features]
    if is_swapped:
        a, b = b, a
    yield np.ascontiguousarray(a.reshape(-1, a.shape[2]))
    yield np.ascontiguousarray(b.transpose(2, 1, 0).reshape(b.shape[2], -1))
