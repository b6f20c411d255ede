"""Activations of an expert's MLP, by name: gated ones, and those of a single projection."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jgg.arguments import as_finite, as_flag, check_instance


@dataclasses.dataclass(frozen=True)
class Activation:
    """What an expert does between its two products.

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
        object.__setattr__(self, "is_gated", as_flag("is_gated", self.is_gated))

    @property
    def curve(self) -> tuple[str, float, float] | None:
        """Name, limit and alpha of what `kernels.activation` computes it by; None for a function of one's own."""
        if isinstance(self.function, _ClampedSwiglu) and self.is_gated:
            return "clamped_silu", self.function.limit, self.function.alpha
        name = _CURVES.get((self.function, self.is_gated))
        return None if name is None else (name, 0.0, 0.0)

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


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate, approximate=False) * up


def _geglu_tanh(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate, approximate=True) * up


def _reglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.relu(gate) * up


def _gelu(up: jax.Array) -> jax.Array:
    return jax.nn.gelu(up, approximate=False)


def _gelu_tanh(up: jax.Array) -> jax.Array:
    return jax.nn.gelu(up, approximate=True)


def _relu_squared(up: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(up))


_CURVES = {
    (_swiglu, True): "silu",
    (_geglu, True): "gelu",
    (_geglu_tanh, True): "gelu_tanh",
    (_reglu, True): "relu",
    (jax.nn.silu, False): "silu",
    (_gelu, False): "gelu",
    (_gelu_tanh, False): "gelu_tanh",
    (jax.nn.relu, False): "relu",
    (_relu_squared, False): "relu_squared",
}

ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("swiglu", _swiglu),
        Activation("geglu", _geglu),
        Activation("geglu_tanh", _geglu_tanh),
        Activation("reglu", _reglu),
        dataclasses.replace(clamped_swiglu(), name="clamped_swiglu"),
        Activation("silu", jax.nn.silu, is_gated=False),
        Activation("gelu", _gelu, is_gated=False),
        Activation("gelu_tanh", _gelu_tanh, is_gated=False),
        Activation("relu", jax.nn.relu, is_gated=False),
        Activation("relu_squared", _relu_squared, is_gated=False),
    )
}


def find_activation(activation: str | Activation) -> Activation:
    """The activation of that name, or the one given.

    Raises: ValueError: there is none of that name.
    """
    if isinstance(activation, Activation):
        return activation
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation must be an Activation or one of {sorted(ACTIVATIONS)}, got {activation!r}.")
    return ACTIVATIONS[activation]
