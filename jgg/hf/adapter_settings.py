"""Reads and writes adapter_config.json, PEFT's settings of a LoRA adapter; every error names the file and the key."""

import dataclasses
import itertools
import math
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jgg.core.arguments import as_finite, as_flag, as_int, check, check_instance
from jgg.hf.patterns import check_pattern, matches, matches_end

# what changes more than a low-rank term of a matrix
_REFUSED = (
    "alora_invocation_tokens",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
)
_OTHERWISE = ": PEFT's merge_and_unload makes a model of such an adapter, which needs none."
# other initializations change the base weights
_INITIALIZATIONS = True, False, "gaussian", "eva", "mica", "orthogonal", None
_DEFAULTS = {"r": 8, "lora_alpha": 8}  # PEFT's, where a key is absent
_LARGEST = 1e38  # about float32's largest number
_NEW = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "lora_dropout": 0.0, "target_modules": []}


@dataclasses.dataclass(frozen=True)
class AdapterSettings:
    """The content of adapter_config.json, checked to describe a LoRA adapter of only low-rank terms.

    Attributes:
      where: what holds the settings, for messages.
      values: the settings by their keys in PEFT's `LoraConfig`.

    Raises: ValueError, TypeError: jgg does not support a setting; the message has `where` and the key.
    """

    where: str
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        values, where = self.values, self.where
        method, bias, begin = values.get("peft_type"), values.get("bias"), values.get("init_lora_weights")
        check(method == "LORA", f"peft_type of {where} must be 'LORA', got {method!r}.")
        check(bias in ("none", None), f"bias of {where} must be 'none', got {bias!r}{_OTHERWISE}")
        check(
            begin in _INITIALIZATIONS,
            f"init_lora_weights of {where} must be in {_INITIALIZATIONS}, got {begin!r}{_OTHERWISE}",
        )
        for key in _REFUSED:
            check(
                not values.get(key),
                f"{key} of {where} must be absent, null or false, got {values.get(key)!r}{_OTHERWISE}",
            )
        for key in ("rank_pattern", "alpha_pattern"):
            patterns = values.get(key) or {}
            check_instance(f"{key} of {where}", patterns, Mapping, "null or an object")
            for pattern in patterns:
                self._check_pattern(key, pattern)
        for key in ("target_parameters", "target_modules", "exclude_modules"):
            self._check_names(key)
        layers = self._layers
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise TypeError(f"layers_to_transform of {where} must be null, an int or a list of ints, got {layers!r}.")
        self._check_names("layers_pattern")

    def _check_names(self, key: str) -> None:
        """Raises unless a setting is a list of names or, where PEFT takes one, a pattern."""
        names = self.values.get(key) or []
        if isinstance(names, str) and key != "target_parameters":
            self._check_pattern(key, names)
        elif not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"{key} of {self.where} must be a list of names, got {names!r}.")

    def _check_pattern(self, key: str, pattern: str) -> None:
        try:
            check_pattern(pattern)
        except ValueError as error:
            shown = reprlib.repr(pattern)
            raise ValueError(f"{key} of {self.where} must be regular expressions, got {shown}: {error}.") from error

    def rank(self, name: str) -> int:
        """Returns r of the module or parameter of this name."""
        return as_int(f"r of {name} in {self.where}", self._value_for(name, "rank_pattern", "r"), 1)

    def scale(self, name: str, rank: int) -> float:
        """Returns the scale of a term of this rank."""
        what = f"lora_alpha of {name} in {self.where}"
        alpha = as_finite(what, self._value_for(name, "alpha_pattern", "lora_alpha"))
        check(abs(alpha) < _LARGEST, f"{what} must be less than {_LARGEST}, got {alpha}.")
        return alpha / self._divisor(rank)

    def _value_for(self, name: str, patterns: str, default: str) -> Any:
        for pattern, value in (self.values.get(patterns) or {}).items():
            if matches_end(pattern, name):
                return value
        return self.values.get(default, _DEFAULTS[default])

    def _divisor(self, rank: int) -> float:
        is_rank_stabilized = as_flag(f"use_rslora of {self.where}", self.values.get("use_rslora") or False)
        return math.sqrt(rank) if is_rank_stabilized else rank

    def targets_parameter(self, name: str) -> bool:
        """Returns whether target_parameters include the parameter of this name."""
        return _has_end_of(name, self.values.get("target_parameters") or ())

    def targets_module(self, name: str) -> bool:
        """Returns whether target_modules include the linear module of this name, which must not be the model's head."""
        targets, excluded = (self.values.get(key) or () for key in ("target_modules", "exclude_modules"))
        is_excluded = matches(excluded, name) if isinstance(excluded, str) else _has_end_of(name, excluded)
        if is_excluded:
            return False
        if isinstance(targets, str):
            return targets.lower() == "all-linear" or matches(targets, name)
        return _has_end_of(name, targets) and (not self._layers or self._layer_of(name) in self._layers)

    def check_has_tensors(self, parameters: Collection[str], found: Collection[str]) -> None:
        """Raises ValueError if target_parameters name one of these parameters without a tensor in `found`."""
        for target in self.values.get("target_parameters") or ():
            check(
                not any(_ends_with(name, target) for name in parameters)
                or any(_ends_with(name, target) for name in found),
                f"target_parameters of {self.where} must be names with an adapter in the file of tensors, got "
                f"{target!r}, without one.",
            )

    @property
    def _layers(self) -> Sequence[int]:
        """The layers that target_modules apply to; an empty list for all."""
        layers = self.values.get("layers_to_transform")
        return [] if layers is None else [layers] if isinstance(layers, int) else layers

    def _layer_of(self, name: str) -> int | None:
        """The first number in a module's name after a name in layers_pattern, or after any name without one."""
        given, parts = self.values.get("layers_pattern") or ".*", name.split(".")
        patterns = [given] if isinstance(given, str) else given
        return next(
            (
                int(number)
                for pattern in patterns
                for part, number in itertools.pairwise(parts)
                if number.isdecimal() and matches(pattern, part)
            ),
            None,
        )

    def with_terms(self, terms: Mapping[str, tuple[int, float]], experts: Collection[str]) -> "AdapterSettings":
        """Returns settings that give the parameters in `terms` their ranks and scales.

        Args:
          terms: rank and scale by the name of a parameter.
          experts: the names of all parameters of experts; those missing from `terms` will not be targets.
        """
        own = {name: (self.rank(name), self.scale(name, rank)) for name, (rank, _) in terms.items()}
        ranks = {name: rank for name, (rank, _) in terms.items() if rank != own[name][0]}
        alphas = {
            name: as_number(scale * self._divisor(rank))
            for name, (rank, scale) in terms.items()
            if scale != own[name][1]
        }
        targets = list(self.values.get("target_parameters") or ())
        if {name for name in experts if self.targets_parameter(name)} != terms.keys():
            others = [target for target in targets if not any(_ends_with(name, target) for name in experts)]
            targets = [*others, *terms]
        changes: dict[str, object] = {"target_parameters": targets}
        if terms:
            changes["lora_dropout"] = 0.0  # PEFT has none for parameters
        for key, changed in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
            # PEFT takes the first that matches
            changes[key] = {re.escape(name): value for name, value in changed.items()} | (self.values.get(key) or {})
        return dataclasses.replace(self, values={**self.values, **changes})


def new_settings(where: str, settings: Mapping[str, object], terms: Mapping[str, tuple[int, float]]) -> AdapterSettings:
    """Returns the settings; missing r and lora_alpha are taken from the first term."""
    check_instance(where, settings, Mapping, "a mapping, the content of adapter_config.json")
    first = next(iter(terms.values()), None)
    own: dict[str, object] = {}
    if first is not None:
        rank, scale = first
        own = {"r": rank, "lora_alpha": as_number(scale * rank)}
    return AdapterSettings(where, {**_NEW, **own, **settings})


def as_number(value: float) -> int | float:
    """The value as PEFT writes it: whole numbers without a decimal point."""
    return int(value) if value == int(value) else value


def _has_end_of(name: str, targets: Collection[str]) -> bool:
    return any(_ends_with(name, target) for target in targets)


def _ends_with(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")
