"""Activations of an expert's MLP, by name or as functions: gated ones, and those of a single projection."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jgg.arguments import as_finite, as_flag, check_instance


@dataclasses.dataclass(frozen=True)
class Activation:
    """What an expert does between its two products.

    Two are equal, and share a compiled program, if they have the same name and the same function object, or a
    `functools.partial` of the same function and arguments. A lambda in the body of a function is a new object in each
    call, for which JAX traces and compiles again: define it once, outside.

    Attributes:
      name: as users give it.
      function: (gate, up) -> hidden where `is_gated`, else up -> hidden; elementwise, float32.
      is_gated: the first product has two halves, gate and up, of I features each.
    """

    name: str
    function: Callable[..., jax.Array]
    is_gated: bool = True

    def __post_init__(self) -> None:
        check_instance("name", self.name, str, "a str")
        check_instance("function", self.function, Callable, "a function")
        object.__setattr__(self, "function", _comparable(self.function))
        object.__setattr__(self, "is_gated", as_flag("is_gated", self.is_gated))

    @property
    def curve(self) -> tuple[str, float, float] | None:
        """Name, limit and alpha of what `kernels.activation` computes it by; None for a function of one's own."""
        if isinstance(self.function, _ClampedSwiglu) and self.is_gated:
            return "clamped_silu", self.function.limit, self.function.alpha
        for name, curve in _CURVES.items():
            if self.function == (_Gated(curve) if self.is_gated else curve):
                return name, 0.0, 0.0
        return None

    def __call__(self, pre_activation: jax.Array, interleaved: bool = False) -> jax.Array:
        """Hidden features [M, I], float32, from the first product, [M, 2 * I] if gated and else [M, I].

        Args:
          pre_activation: gate and up side by side or, `interleaved`, in turns: gate 0, up 0, gate 1, up 1, ...
          interleaved: see above.
        """
        values = pre_activation.astype(jnp.float32)
        if not self.is_gated:
            return self.function(values)
        if interleaved:
            return self.function(values[..., ::2], values[..., 1::2])
        return self.function(*jnp.split(values, 2, axis=-1))


def clamped_swiglu(limit: float = 7.0, alpha: float = 1.702) -> Activation:
    """gpt-oss's SwiGLU: `gate * sigmoid(alpha * gate) * (up + 1)` with gate at most limit and up in [-limit, limit].

    Raises: ValueError: a number is not finite. TypeError: it is none.
    Source: the gpt-oss model card, https://arxiv.org/abs/2508.10925.
    """
    limit, alpha = as_finite("limit", limit), as_finite("alpha", alpha)
    return Activation(f"clamped_swiglu({limit}, {alpha})", _ClampedSwiglu(limit, alpha))


@dataclasses.dataclass(frozen=True)
class _ClampedSwiglu:
    limit: float
    alpha: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


@dataclasses.dataclass(frozen=True)
class _Partial:
    """A `functools.partial` that is equal to another of the same function and arguments."""

    function: Callable[..., jax.Array]
    args: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]

    def __call__(self, *args: jax.Array) -> jax.Array:
        return self.function(*self.args, *args, **dict(self.keywords))


def _comparable(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    if not isinstance(function, functools.partial):
        return function
    return _Partial(function.func, function.args, tuple(sorted(function.keywords.items())))


@dataclasses.dataclass(frozen=True)
class _Gated:
    curve: Callable[[jax.Array], jax.Array]

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return self.curve(gate) * up


def _relu_squared(up: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(up))


# as `kernels.activation` names them
_CURVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": _comparable(functools.partial(jax.nn.gelu, approximate=False)),
    "gelu_tanh": _comparable(functools.partial(jax.nn.gelu, approximate=True)),
    "relu": jax.nn.relu,
    "relu_squared": _relu_squared,
}
_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}

ACTIVATIONS = {
    **{name: Activation(name, _Gated(_CURVES[curve])) for name, curve in _GATED.items()},
    "clamped_swiglu": dataclasses.replace(clamped_swiglu(), name="clamped_swiglu"),
    **{name: Activation(name, curve, is_gated=False) for name, curve in _CURVES.items()},
}


ActivationLike = str | Activation | Callable[[jax.Array], jax.Array]
"""A name in ACTIVATIONS, an Activation, or a function of the gate such as `jax.nn.silu`."""


def find_activation(activation: ActivationLike) -> Activation:
    """The activation of that name, the one given or, of a function of the gate, `function(gate) * up`.

    Raises: ValueError: there is none of that name, or it is neither.
    """
    if isinstance(activation, Activation):
        return activation
    if callable(activation):
        curve = _CURVES["gelu_tanh"] if activation is jax.nn.gelu else _comparable(activation)  # gelu's default
        return Activation("gated function", _Gated(curve))
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be an Activation or one of {sorted(ACTIVATIONS)} or a function, got {activation!r}."
        )
    return ACTIVATIONS[activation]
