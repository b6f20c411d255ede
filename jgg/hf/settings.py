"""Reads a language model's settings from config.json, and checks the type of each."""

import copy
from collections.abc import Mapping
from typing import Any, Self

from jgg.core.arguments import as_finite, as_flag, as_int, check

type Arguments = dict[str, Any]  # of a MoELayer or a ModelConfig

LARGEST = 2**31 - 1  # what an int of config.json may be at most, if nothing smaller is said
_LARGEST_FLOAT = (2 - 2.0**-23) * 2.0**127
# what null says in these keys; other keys may be null where transformers' default is null or an object
_NULLS = {
    "attention_chunk_size": None,
    "eos_token_id": None,
    "head_dim": None,
    "n_group": 1,
    "n_shared_experts": 0,
    "num_key_value_heads": None,
    "num_nextn_predict_layers": 0,
    "partial_rotary_factor": None,
    "q_lora_rank": None,
    "rope_theta": None,
    "sliding_window": None,
    "topk_group": 1,
}


def language_model(config: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the language model's part of a config.

    Raises: ValueError: the config's "text_config" is not an object.
    """
    found = config.get("text_config")
    if found is None:
        return config
    if not isinstance(found, Mapping):
        raise ValueError(f"text_config must be an object, got {found!r}.")
    return found


class Settings:
    """The settings of a language model in a config; missing ones have transformers' defaults.

    Args:
      config: content of config.json.
      defaults: the keys that can be read, each with its value if the config lacks it.
      aliases: another name for some of these keys.
      outer: the keys that are read next to "text_config", not in it, each with its value if the config lacks it.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        defaults: Mapping[str, object],
        aliases: Mapping[str, str],
        outer: Mapping[str, object],
    ) -> None:
        given = {key: default if config.get(key) is None else config[key] for key, default in outer.items()}
        self.given, self.defaults, self.aliases = {**language_model(config), **given}, defaults, aliases
        self.model_type = config["model_type"]

    def with_defaults(self, **defaults: object) -> Self:
        """The settings with other defaults for some keys, which depend on the settings of other keys."""
        settings = copy.copy(self)
        settings.defaults = {**self.defaults, **defaults}
        return settings

    def updated(self, own: Mapping[str, object]) -> Self:
        """The same settings, with some of them replaced."""
        new = copy.copy(self)
        new.given = {**self.given, **own}
        return new

    @property
    def known(self) -> set[str]:
        """The names of the keys that can be read."""
        return {*self.defaults, *self.aliases.values()}

    def name(self, key: str) -> str:
        """The name that the config has for a key.

        Raises: ValueError: the config has both names, with different values.
        """
        both = dict.fromkeys((key, self.aliases.get(key, key)))
        names = [name for name in both if self.given.get(name) is not None]
        values = [self.given[name] for name in names]
        check(
            len(values) < 2 or values[0] == values[1],
            f"{' and '.join(names)} must be equal: they name the same setting, got {values}.",
        )
        return names[0] if names else key

    def get(self, key: str) -> Any:
        """The value of a key, which may be None if transformers allows null there.

        Raises: ValueError: the value is null where that means nothing.
        """
        name, default = self.name(key), self.defaults[key]
        value = self.given.get(name, default)
        if value is not None or default is None:
            return value
        if isinstance(default, Mapping):
            return default
        check(key in _NULLS, f"config of model_type {self.model_type!r} must have no null in {key!r}, got null.")
        return _NULLS[key]

    def int(self, key: str, least: int = 1, most: int = LARGEST) -> int:
        """The value of a key that must be a whole number from `least` to `most`."""
        number = as_int(self.name(key), self.get(key), least)
        check(number <= most, f"{self.name(key)} must be at most {most}, got {number}.")
        return number

    def number(self, key: str) -> float:
        """The value of a key, a number that must fit in float32."""
        number = as_finite(self.name(key), self.get(key))
        check(abs(number) <= _LARGEST_FLOAT, f"{self.name(key)} must be finite in float32, got {number}.")
        return number

    def flag(self, key: str) -> bool:
        """The value of a key that must be true or false."""
        return as_flag(self.name(key), self.get(key))

    def only(self, key: str, value: object) -> None:
        """Raises unless a setting has this value, the only one that `jgg.models` supports.

        A key that cannot be read may be absent or null, since transformers does not read it either.
        """
        is_read = key in self.defaults
        got = self.get(key) if is_read else self.given.get(key)
        check(got == value or (got is None and not is_read), f"{key} must be {value!r}, got {got!r}.")
