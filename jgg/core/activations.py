"""Activations of an expert's MLP, by name or as functions: gated ones, and ones of a single projection."""

import dataclasses
import functools
import math
import sys
import types
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp

from jgg.core.arguments import as_finite, as_flag, check_instance


@dataclasses.dataclass(frozen=True)
class Activation:
    """What an expert does between its two products.

    Two activations are equal, and share a compiled program, if they have the same name and the same function object, or
    a `functools.partial` of the same function and arguments. A lambda in the body of a function is a new object in each
    call, for which JAX traces and compiles again: define it once, outside. A deep copy of an Activation is equal to it.
    A pickled and loaded Activation is equal too, if its function can be imported by name.

    Attributes:
      name: as users give it.
      function: (gate, up) -> hidden where `is_gated`, else up -> hidden; elementwise, float32. It must be hashable: a
        `functools.partial` may hold numbers, but no arrays.
      is_gated: the first product has two halves, gate and up, of I features each.
    """

    name: str
    function: Callable[..., jax.Array]
    is_gated: bool = True

    def __post_init__(self) -> None:
        check_instance("name", self.name, str, "a str")
        check_instance("function", self.function, Callable, "a function")
        object.__setattr__(self, "function", _comparable("function", self.function))
        object.__setattr__(self, "is_gated", as_flag("is_gated", self.is_gated))

    @property
    def curve(self) -> tuple[str, float, float] | None:
        """Name, limit and alpha of its curve in `kernels.activation`; None for a function that kernels do not have."""
        function: object = self.function
        if self.is_gated:
            if isinstance(function, _ClampedSwiglu):
                return "clamped_silu", function.limit, function.alpha
            function = function.curve if isinstance(function, _Gated) else None
        return (function.name, 0.0, 0.0) if isinstance(function, _Curve) else None

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

    Raises: ValueError: an argument is not finite. TypeError: it is no number.
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
    args: tuple[Hashable, ...]
    keywords: tuple[tuple[str, Hashable], ...]

    def __call__(self, *args: jax.Array) -> jax.Array:
        return self.function(*self.args, *args, **dict(self.keywords))


@dataclasses.dataclass(frozen=True)
class _Decorated:
    """A function that `jax.jit` or `jax.custom_jvp` wrapped, as an object that is equal to its copies."""

    function: Callable[..., jax.Array]

    def __call__(self, *args: object, **keywords: object) -> jax.Array:
        return self.function(*args, **keywords)

    def __deepcopy__(self, memo: dict[int, object]) -> "_Decorated":
        return self

    def __reduce__(self) -> tuple[object, ...]:
        module, name = getattr(self.function, "__module__", ""), getattr(self.function, "__qualname__", "")
        if getattr(sys.modules.get(module), name, None) is self.function:
            return _import, (module, name)
        return _Decorated, (self.function,)  # pickle says why it cannot take that


def _import(module: str, name: str) -> _Decorated:
    __import__(module)
    return _Decorated(getattr(sys.modules[module], name))


def _comparable(name: str, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The function as an object that is equal to its copies; raises if JAX cannot take it as a static argument."""
    comparable: Callable[..., jax.Array]
    if isinstance(function, functools.partial):
        comparable = _Partial(_copyable(function.func), function.args, tuple(sorted(function.keywords.items())))
    else:
        comparable = _copyable(function)
    try:
        curve = _KNOWN.get(comparable)
    except TypeError:
        raise TypeError(
            f"{name} must be hashable, and a functools.partial may hold numbers but no arrays, got {function!r}."
        ) from None
    return comparable if curve is None else _Curve(curve)


def _copyable(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    is_decorated = hasattr(function, "__wrapped__") and not isinstance(function, types.FunctionType)
    return _Decorated(function) if is_decorated else function


@dataclasses.dataclass(frozen=True)
class _Gated:
    curve: Callable[[jax.Array], jax.Array]

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return self.curve(gate) * up


@dataclasses.dataclass(frozen=True)
class _Curve:
    """A function in _CURVES, by its name there."""

    name: str

    def __call__(self, up: jax.Array) -> jax.Array:
        return _CURVES[self.name](up)


@jax.custom_jvp
def _erfc(x: jax.Array) -> jax.Array:
    """`jax.lax.erfc`, whose own derivative fails inside `jax.shard_map` with JAX 0.12.0."""
    return jax.lax.erfc(x)


@_erfc.defjvp
def _erfc_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (x_dot,) = primals, tangents
    return _erfc(x), -2 / math.sqrt(math.pi) * jnp.exp(-x * x) * x_dot


def _gelu(up: jax.Array) -> jax.Array:
    return 0.5 * up * _erfc(-math.sqrt(0.5) * up)


def _gelu_tanh(up: jax.Array) -> jax.Array:
    return jax.nn.gelu(up, approximate=True)


def _relu_squared(up: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(up))


# as `kernels.activation` names them
_CURVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": jax.nn.relu,
    "relu_squared": _relu_squared,
}
# JAX's functions, as `_comparable` makes them, that are one of the curves
_KNOWN: dict[Callable[..., jax.Array], str] = {
    _copyable(jax.nn.silu): "silu",
    _copyable(jax.nn.relu): "relu",
    jax.nn.gelu: "gelu_tanh",  # by default
    _Partial(jax.nn.gelu, (), (("approximate", True),)): "gelu_tanh",
    _Partial(jax.nn.gelu, (), (("approximate", False),)): "gelu",
}
_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
_UNGATED = {f"ungated_{curve}": curve for curve in _CURVES}

ACTIVATIONS = {
    **{name: Activation(name, _Gated(_Curve(curve))) for name, curve in _GATED.items()},
    "clamped_swiglu": dataclasses.replace(clamped_swiglu(), name="clamped_swiglu"),
    **{name: Activation(name, _Curve(curve), is_gated=False) for name, curve in _UNGATED.items()},
}
"""The activations by name; an activation is gated unless its name begins with "ungated_"."""


ActivationLike = str | Activation | Callable[[jax.Array], jax.Array]
"""A name in ACTIVATIONS, an Activation, or a function of the gate such as `jax.nn.silu`."""


def find_activation(activation: ActivationLike) -> Activation:
    """The Activation for an argument: looked up by name, returned unchanged, or `function(gate) * up` of a function.

    Raises:
      ValueError: it is neither an Activation, a function nor a known name. Words such as "silu", which models with a
        gate and models without one write, are no names.
      TypeError: the function is not hashable.
    """
    if isinstance(activation, Activation):
        return activation
    if callable(activation):
        return Activation("gated function", _Gated(_comparable("activation", activation)))
    if isinstance(activation, str) and activation in _CURVES:
        gated = [f"{name!r}, which is {curve}(gate) * up, or " for name, curve in _GATED.items() if curve == activation]
        raise ValueError(
            f"activation must be {''.join(gated)}'ungated_{activation}', which has no gate, got {activation!r}."
        )
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be an Activation or one of {sorted(ACTIVATIONS)} or a function, got {activation!r}."
        )
    return ACTIVATIONS[activation]
