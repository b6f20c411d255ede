"""`LeftOut`: what a folder has that a model does not, such as a tokenizer or a vision tower, and how it is copied."""

import dataclasses
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self

import jax.numpy as jnp
import numpy as np

from jgg.core.arguments import check
from jgg.hf.checkpoints import Checkpoint
from jgg.hf.files import Header
from jgg.hf.hub import FILES
from jgg.hf.quantized import QuantizedTensors, quantization


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """What `load` left out of a folder, though other programs may use it.

    Attributes:
      folder: the absolute path of the folder, without symbolic links, which may lead elsewhere later.
      names: the names of the tensors there.
      files: the names of the files there, such as those of the tokenizer.
    """

    folder: str
    names: tuple[str, ...]
    files: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: Path, names: Iterable[str]) -> Self | None:
        """What is left out of a folder in which these tensors are; None if that is nothing."""
        place = Path(os.path.realpath(folder))
        files = {path.name for pattern in FILES for path in place.glob(pattern) if path.is_file()}
        found = cls(str(place), tuple(names), tuple(sorted(files)))
        return found if found.names or found.files else None

    def copy_files(self, folder: Path) -> None:
        """Copies the files into a folder; a warning names those that can no longer be read."""
        missing = []
        for name in self.files:
            try:
                content = Path(self.folder, name).read_bytes()
            except OSError:
                missing.append(name)
            else:
                (folder / name).write_bytes(content)
        if missing:
            warnings.warn(
                f"jgg.models.save writes no {', '.join(missing)}: {self.folder}, which the model was loaded from, has "
                "none any longer.",
                stacklevel=6,
            )

    def opened(self) -> tuple[Checkpoint, dict[str, Header]] | None:
        """The folder and the headers of its tensors; None, after a warning, unless it still has all of the names."""
        try:
            checkpoint = Checkpoint(self.folder)
            headers = checkpoint.headers()
            missing = next((name for name in self.names if name not in headers), None)
            check(missing is None, f"{self.folder} must still have {missing}, got no such tensor.")
        except (OSError, ValueError) as error:
            warnings.warn(
                f"jgg.models.save writes no copies of {len(self.names)} tensors that the model does not have, such as "
                f"{self.names[0]}, as they cannot be read from the folder that it was loaded from: {error}",
                stacklevel=5,
            )
            return None
        return checkpoint, headers


class Copies:
    """The tensors that `save` copies from the folder that a model was loaded from; iteration reads them one by one.

    Tensors in FP8 are copied unchanged if the new folder has the same format, and otherwise converted to its dtype. All
    others are copied bit for bit.

    Args:
      left_out: what is copied; None if that is nothing.
      read, written: content of config.json of the folder that the model was loaded from, and of the new one.
      dtype: dtype of the new folder.
    """

    def __init__(
        self, left_out: LeftOut | None, read: Mapping[str, object], written: Mapping[str, object], dtype: jnp.dtype
    ) -> None:
        self._names: list[str] = []
        self._dtype, self._dequantized = dtype, set[str]()
        self._headers: Mapping[str, Header] = {}
        if left_out is None or not left_out.names:
            return
        opened = left_out.opened()
        if opened is None:
            return
        self._tensors: Mapping[str, np.ndarray] = opened[0]
        self._headers, self._names, how = opened[1], list(left_out.names), quantization(read)
        if how is not None and how != quantization(written):
            own = set(left_out.names)
            self._tensors = quantized = QuantizedTensors(opened[0], how)
            self._names = [name for name in quantized if not own.isdisjoint(quantized.stored_names(name))]
            self._dequantized = quantized.names.intersection(self._names)

    @property
    def dense_modules(self) -> set[str]:
        """The modules of all matrices that are not in FP8 in the new folder."""
        names = [name for name in self._names if name.endswith(".weight") and self._is_dense_matrix(name)]
        return set(map(module_of, names))

    def _is_dense_matrix(self, name: str) -> bool:
        if name in self._dequantized:
            return True
        dtype, shape = self._headers[name]
        return len(shape) > 1 and dtype != "F8_E4M3"

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the name and the array of each tensor."""
        for name in self._names:
            tensor = self._tensors[name]
            yield name, tensor.astype(self._dtype) if name in self._dequantized else tensor


def module_of(name: str) -> str:
    """The module of a matrix; one for all of a layer's experts."""
    block, is_of_experts, _ = name.rpartition(".experts.")
    return f"{block}.experts" if is_of_experts else name.removesuffix(".weight")
