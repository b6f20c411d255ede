"""Reads the settings of rotary position embeddings, in the formats of transformers 4 and 5."""

import math
from collections.abc import Mapping

import numpy as np

from jgg.core.arguments import as_finite, as_flag, check, check_instance
from jgg.core.mixers import RotaryConfig
from jgg.hf.settings import Settings

_LARGEST = float(np.finfo(np.float32).max)


def read_rotary(settings: Settings, head_features: int, layer_type: str | None = None) -> RotaryConfig:
    """The rotary embedding of heads with `head_features` features.

    transformers 5 writes all keys into "rope_parameters"; other versions write "rope_scaling" and some keys next to it.

    Args:
      settings: the settings.
      head_features: features of a head.
      layer_type: the kind of layer, such as "sliding_attention": "rope_parameters" may have an object for each kind.
    """
    for name in ("rope_scaling", "rope_parameters"):
        check_instance(name, settings.get(name) or {}, Mapping, "null or an object")
    where = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
    part = settings.get(where) or {}
    if layer_type is not None and layer_type in part:
        part, where = part[layer_type] or {}, f"{where} of {layer_type}"
        check_instance(where, part, Mapping, "null or an object")
        check(part.get("truncate", True) is True, f"truncate in {where} must be true, as transformers takes it so.")
    given = {key: value for key, value in part.items() if value is not None}
    for key in ("mrope_interleaved", "mrope_section"):  # which features follow which axis: text has one position in all
        given.pop(key, None)
    theta = _theta(given.pop("rope_theta", settings.get("rope_theta")))
    if settings.get("rope_theta") is not None:
        _theta(settings.get("rope_theta"))  # checks it though it may have no effect
    # older configs have "type", and transformers writes both
    kind, other = given.pop("rope_type", None), given.pop("type", "default")
    kind = other if kind is None else kind
    partial = given.pop("partial_rotary_factor", settings.get("partial_rotary_factor"))
    rotated = head_features if kind == "proportional" else _rotated(settings, partial, head_features)
    frequencies, scale = theta ** -(np.arange(0, rotated, 2) / rotated), 1.0
    if kind == "yarn":
        context, longest = _context(settings, given), settings.int("max_position_embeddings")
        if "factor" in part:
            given.setdefault("factor", longest / context)
        frequencies, scale = _yarn(frequencies, theta, rotated, context, given)
    elif kind == "llama3":
        frequencies = _llama3(frequencies, _context(settings, given), given)
    elif kind == "linear":
        frequencies = _slowed(frequencies, _factor(kind, given), 1.0)
    elif kind == "proportional":
        frequencies = _proportional(frequencies, partial, given)
    else:
        known = "'default', 'linear', 'llama3', 'proportional' or 'yarn'"
        check(kind == "default", f"rope_type must be {known}, got {kind!r}.")
    check(not given, f"{where} of rope_type {kind!r} must have only keys that jgg.models knows, got {given}.")
    is_finite = all(number <= _LARGEST for number in (*frequencies, scale))
    check(is_finite, f"{where} must give frequencies and a scale that float32 holds, got {dict(part)}.")
    return RotaryConfig(tuple(map(float, frequencies)), scale)


def read_logits_factor(settings: Settings) -> float:
    """The factor of latent attention's logits that follows from YaRN's "mscale_all_dim", else 1.

    Source: `DeepseekV3Attention` of transformers, and the code of DeepSeek-V3. `read_rotary` checks the other settings.
    """
    part = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    of_all = part.get("mscale_all_dim")
    return _mscale(_factor("yarn", dict(part)), as_finite("mscale_all_dim", of_all)) ** 2 if of_all else 1.0


def _theta(value: object) -> float:
    theta = as_finite("rope_theta", value)
    check(theta > 1, f"rope_theta must be greater than 1, got {theta}.")
    return theta


def _context(settings: Settings, given: dict[str, object]) -> float:
    """The number of positions a model had before its frequencies were slowed down; removes the key from `given`."""
    key = "original_max_position_embeddings"
    found = given.pop(key, settings.int("max_position_embeddings"))
    own = settings.get(key)
    return _as_positive(key, found if own is None else own)


def _rotated(settings: Settings, factor: object, head_features: int) -> int:
    """The number of rotated features of a head, rounded up to an even number."""
    factor = 1.0 if factor is None else as_finite("partial_rotary_factor", factor)
    is_partial = settings.defaults["partial_rotary_factor"] is not None
    whole = f"partial_rotary_factor must be 1, as {settings.model_type} rotates all features, got {factor}."
    check(is_partial or factor == 1, whole)
    rotated = int(head_features * factor)
    fits = rotated > 0 and rotated + rotated % 2 <= head_features
    check(fits, f"partial_rotary_factor must leave pairs among the {head_features} features of head_dim, got {factor}.")
    return rotated


def _proportional(frequencies: np.ndarray, part: object, given: dict[str, object]) -> np.ndarray:
    """The frequencies of all pairs of a head. The last ones are 0, so only a part of the pairs is rotated.

    Unlike in a partial embedding, the two features of a pair are half a head apart. Removes its keys from `given`.
    Source: `_compute_proportional_rope_parameters` of transformers.
    """
    part = 1.0 if part is None else as_finite("partial_rotary_factor", part)
    check(0 <= part <= 1, f"partial_rotary_factor must be from 0 to 1, got {part}.")
    factor = _as_positive("factor", given.pop("factor", 1.0))
    is_rotated = np.arange(len(frequencies)) < int(part * (2 * len(frequencies)) // 2)
    return np.where(is_rotated, frequencies / factor, 0.0)


def _yarn(
    frequencies: np.ndarray, theta: float, rotated: int, context: float, given: dict[str, object]
) -> tuple[np.ndarray, float]:
    """Slows down low frequencies by `factor`, keeps high ones, and interpolates linearly between the two.

    Removes its keys from `given`. Source: Peng et al., YaRN, 2023, 3.2 and 3.4.
    """
    factor = _factor("yarn", given)
    fast, slow = (_as_positive(key, given.pop(key, default)) for key, default in (("beta_fast", 32), ("beta_slow", 1)))
    check(fast >= slow, f"beta_fast must be at least beta_slow, {slow}, got {fast}.")
    check(rotated % 2 == 0, f"partial_rotary_factor must leave an even number of features for YaRN, got {rotated}.")
    # the index of the pair that turns so often over the context
    first, last = (
        rotated * (math.log(context) - math.log(turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow)
    )
    if as_flag("truncate", given.pop("truncate", True)):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    width = last - first if last != first else 1e-3
    slowed = np.clip((np.arange(len(frequencies)) - first) / width, 0, 1)
    return _slowed(frequencies, factor, slowed), _yarn_scale(factor, given)


def _llama3(frequencies: np.ndarray, context: float, given: dict[str, object]) -> np.ndarray:
    """Slows frequencies with under `low_freq_factor` turns over the context by `factor`, and keeps high ones.

    Removes its keys from `given`. Source: `apply_scaling` in the code of Llama 3.1.
    """
    factor = _factor("llama3", given)
    low, high = (_as_positive(key, _required("llama3", given, key)) for key in ("low_freq_factor", "high_freq_factor"))
    check(high >= low, f"high_freq_factor must be at least low_freq_factor, {low}, got {high}.")
    turns = context * frequencies / (2 * math.pi)
    slowed = turns < low if high == low else np.clip((high - turns) / (high - low), 0, 1)
    return _slowed(frequencies, factor, slowed)


def _slowed(frequencies: np.ndarray, factor: float, part: np.ndarray | float) -> np.ndarray:
    """Divides a part of each frequency, from 0 to 1, by a factor."""
    with np.errstate(over="ignore", invalid="ignore"):
        return frequencies * (1 - part) + frequencies / factor * part


def _factor(kind: str, given: dict[str, object]) -> float:
    return _as_positive("factor", _required(kind, given, "factor"))


def _required(kind: str, given: dict[str, object], key: str) -> object:
    """Removes and returns a key of `given` for which this kind of rotary embedding has no default."""
    check(key in given, f"rope_parameters of rope_type {kind!r} must have {key!r}, got {given}.")
    return given.pop(key)


def _yarn_scale(factor: float, given: dict[str, object]) -> float:
    """The factor of the rotated features: `attention_factor`, or else computed from `factor` and the mscales."""
    mscale, of_all = (as_finite(key, given.pop(key, 0)) for key in ("mscale", "mscale_all_dim"))
    check(mscale >= 0 and of_all >= 0, f"mscale and mscale_all_dim must be 0 or more, got {mscale} and {of_all}.")
    own, other, plain = (_mscale(factor, scale) for scale in (mscale, of_all, 1.0))
    return _as_positive("attention_factor", given.pop("attention_factor", own / other if mscale and of_all else plain))


def _mscale(factor: float, scale: float) -> float:
    """What YaRN multiplies by for a context `factor` times as long as in training."""
    return 0.1 * scale * math.log(max(factor, 1)) + 1


def _as_positive(key: str, value: object) -> float:
    """The value of a rotary setting, a number that must be more than 0."""
    number = as_finite(key, value)
    check(number > 0, f"{key} must be more than 0, got {number}.")
    check(number <= _LARGEST, f"{key} must be finite in float32, got {number}.")
    return number
