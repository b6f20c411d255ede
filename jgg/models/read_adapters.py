"""Reads a LoRA adapter in PEFT's format: the terms that a whole model's matrices get, and the options they need."""

from pathlib import Path

from jgg.core.arguments import check
from jgg.core.choices import OF_MIXERS
from jgg.hf import adapters as of_hf
from jgg.hf.adapter_experts import joined, names_of, pair_of, read_term
from jgg.linear.low_rank import LowRank
from jgg.models.decoder import Decoder
from jgg.models.tensors import Matrix, matrices

# the terms by the numbers of the layers that have one, for each of a model's matrices
Found = list[tuple[Matrix, dict[int, LowRank]]]


def read_terms(model: Decoder, folder: Path) -> Found:
    """Reads an adapter's terms for the matrices of a model, which may be from `nnx.eval_shape`.

    As in PEFT, the settings say which matrices have a term. Names that the model lacks are ignored.

    Raises: FileNotFoundError, ValueError, TypeError: as `jgg.models.load_adapter`.
    """
    reader = _Reader(model, folder)
    found = [(matrix, reader.read(matrix)) for matrix in matrices(model)]
    reader.check_all_read()
    check(any(own for _, own in found), f"{reader.where} must have an adapter of a matrix, got none.")
    return found


class _Reader:
    """Reads terms from what `jgg.hf` read, and notes what was read."""

    def __init__(self, model: Decoder, folder: Path) -> None:
        self.config, self.where = model.config.hf, folder / of_hf.TENSORS
        self.settings, self.adapter = of_hf.read_settings(folder), of_hf.load_adapter(folder, self.config)
        self.read_names: set[str] = set()
        self.read_experts: set[tuple[int, str]] = set()

    def read(self, matrix: Matrix) -> dict[int, LowRank]:
        """The terms of a matrix by the numbers of the layers that have one."""
        return self._of_experts(matrix) if matrix.is_of_experts else self._of_modules(matrix)

    def check_all_read(self) -> None:
        """Raises if the file has tensors that no matrix has taken."""
        experts = {(number, name) for number, terms in self.adapter.layers.items() for name in terms}
        names = [f"{name} of layer {number}" for number, name in sorted(experts - self.read_experts)]
        for name in [*sorted(self.adapter.others.keys() - self.read_names), *names]:
            raise ValueError(
                f"{name} is not expected in {self.where}: jgg.models has adapters of attention, recurrent layers, "
                "experts, routers and MLPs alone. PEFT's merge_and_unload makes a model of such an adapter, which "
                "needs none."
            )

    def _of_experts(self, matrix: Matrix) -> dict[int, LowRank]:
        name, layers = matrix.target, self.adapter.layers
        terms = {number: layers[number][name] for number in matrix.stack.plan.numbers if name in layers.get(number, {})}
        for number in matrix.stack.plan.numbers:
            parameter, modules = of_hf.names_of_experts(self.config, number, name)
            is_target = self.settings.targets_parameter(parameter)
            is_target |= bool(terms) and any(map(self.settings.targets_module, modules))
            check(number in terms or not is_target, f"{name} of layer {number} is missing in {self.where}.")
        self.read_experts |= {(number, name) for number in terms}
        return terms

    def _of_modules(self, matrix: Matrix) -> dict[int, LowRank]:
        width = matrix.shape[1] // len(next(iter(matrix.modules.values())))
        shape = matrix.shape[0], width
        parts = {
            number: [self._of_module(module, shape) for module in modules] for number, modules in matrix.modules.items()
        }
        for index in range(matrix.shape[1] // width):
            found = any(own[index] for own in parts.values())
            for number, modules in matrix.modules.items():
                self._check_found(modules[index], parts[number][index], found or matrix.target in OF_MIXERS)
        return {number: joined(own, width) for number, own in parts.items() if any(own)}

    def _check_found(self, module: str, term: LowRank | None, is_in_others: bool) -> None:
        """Raises if a target has no term.

        The names of MLPs in target_modules may have been meant for those of experts, which transformers 4 had. So none
        of a model's layers need have them.
        """
        is_target = self.settings.targets_parameter(f"{module}.weight")
        is_target |= is_in_others and self.settings.targets_module(module)
        check(term is not None or not is_target, f"{pair_of(module)[0]} is missing in {self.where}.")

    def _of_module(self, module: str, shape: tuple[int, int]) -> LowRank | None:
        """The term of one module's matrix [K, N]; None if the file has none."""
        present = names_of(module) & self.adapter.others.keys()
        if not present:
            return None
        name = module if self.settings.targets_module(module) else f"{module}.weight"
        check(
            name == module or self.settings.targets_parameter(name),
            f"{pair_of(module)[0]} of {self.where} must be of a target in {self.settings.where}, got none for "
            f"{module}.",
        )
        rank = self.settings.rank(name)
        self.read_names |= present
        scale = self.settings.scale(name, rank)
        return read_term(self.adapter.others, module, shape, rank, scale, str(self.where))
