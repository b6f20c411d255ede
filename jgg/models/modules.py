"""What the modules of a decoder share: options, parameters by name, products with LoRA, the dense MLP."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jgg.core.activations import find_activation
from jgg.core.arguments import as_dtype, as_flag, as_int, check, check_one_of
from jgg.core.choices import ALL_TARGETS, OF_DENSE, REMAT
from jgg.core.matrix import Matrix
from jgg.core.problem import DTYPES
from jgg.experts.sharding import MoESharding
from jgg.linear.activated import activated
from jgg.linear.dense import dense
from jgg.linear.fp8 import Fp8
from jgg.linear.lora import Lora, adapter_init, target_of
from jgg.linear.several import dense_several
from jgg.models.config import ModelConfig
from jgg.models.placement import checked_sharding, split_init


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a `Decoder` that its config does not give; `checked` makes them."""

    dtype: DTypeLike
    param_dtype: DTypeLike
    lora_param_dtype: DTypeLike
    remat: str
    unroll: int
    quantization: Fp8 | None
    lora: Lora
    implementation: str | None
    batch_invariant: bool
    sharding: MoESharding | None

    @property
    def mapped(self) -> MoESharding | None:
        """The sharding whose devices each compute their own sequences, by kernels in `jax.shard_map`; else None."""
        return self.sharding if self.batch_invariant else None

    @property
    def is_split_by_xla(self) -> bool:
        """Whether XLA splits all but the experts over devices, and so computes it."""
        return self.sharding is not None and self.mapped is None

    @property
    def dense_implementation(self) -> str | None:
        """How all but the experts is computed."""
        return "xla" if self.is_split_by_xla else self.implementation

    @classmethod
    def checked(
        cls,
        *,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        lora_param_dtype: DTypeLike,
        remat: str,
        unroll: int,
        quantization: Fp8 | None,
        lora: Lora,
        implementation: str | None,
        batch_invariant: bool,
        sharding: MoESharding | None,
    ) -> "Options":
        """The options; raises if one of them is wrong, except for those that `jgg.nnx.MoE` checks."""
        check_one_of("remat", remat, REMAT)
        unroll = as_int("unroll", unroll, 1)
        # XLA on a GPU does not compile such a loop: INTERNAL, "Expected instruction to have shape equal to"
        check(remat != "offload" or unroll == 1, f"unroll must be 1 with remat='offload', got {unroll}.")
        dtype, param_dtype = as_dtype("dtype", dtype, DTYPES), as_dtype("param_dtype", param_dtype, DTYPES)
        lora_param_dtype = as_dtype("lora_param_dtype", lora_param_dtype, DTYPES)
        return cls(
            dtype,
            param_dtype,
            lora_param_dtype,
            remat,
            unroll,
            quantization,
            lora.checked(ALL_TARGETS),
            implementation,
            as_flag("batch_invariant", batch_invariant),
            checked_sharding(sharding),
        )


def set_params(
    module: nnx.Module,
    shapes: Mapping[str, tuple[int, ...]],
    scale: float,
    options: Options,
    rngs: nnx.Rngs,
    **initializers: Initializer,
) -> None:
    """Gives a module one parameter per shape: random for matrices "w_...", ones for norms "..._norm", else zeros.

    Args:
      module, shapes, options, rngs: the module, the shapes by name, and how arrays are created.
      scale: the standard deviation of matrices.
      initializers: others, by the names of parameters, or as "norm" for all norms.
    """
    kinds = {"w": nnx.initializers.normal(scale), "norm": nnx.initializers.ones} | initializers
    for name, shape in shapes.items():
        kind = "norm" if name.endswith("norm") else name.partition("_")[0]
        init = kinds.get(name, kinds.get(kind, nnx.initializers.zeros))
        init = split_init(init, (name,), shape, options.sharding)
        setattr(module, name, nnx.Param(init(rngs.params(), shape, options.param_dtype)))
    for name, shape in options.lora.shapes(shapes).items():
        init = adapter_init(name, getattr(module, target_of(name)).get_value())
        setattr(module, name, nnx.LoRAParam(init(rngs.params(), shape, options.lora_param_dtype)))


def linear(module: nnx.Module, x: jax.Array, name: str, options: Options, adapters: bool = True) -> jax.Array:
    """Applies a module's matrix "w_name" to x, with its adapter and its bias "b_name" if it has them.

    Without `adapters`, the adapter is left out.
    """
    return dense(
        x,
        *_matrix_and_bias(module, name, options, adapters),
        implementation=options.dense_implementation,
        batch_invariant=options.batch_invariant,
    )


def linear_several(
    module: nnx.Module, x: jax.Array, names: Sequence[str], options: Options, adapters: bool = True
) -> tuple[jax.Array, ...]:
    """What `linear` computes for each of the names, with what these share computed once."""
    matrices, biases = zip(*(_matrix_and_bias(module, name, options, adapters) for name in names), strict=True)
    return dense_several(
        x,
        matrices,
        biases,
        implementation=options.dense_implementation,
        batch_invariant=options.batch_invariant,
    )


def matrix_of(module: nnx.Module, name: str, options: Options, adapters: bool = True) -> Matrix:
    """A module's matrix of this name with its adapter, if it has one; without `adapters` it has none."""
    lora = options.lora if adapters else options.lora.of({})
    return lora.matrix(name, _params(module, name, lora))


def _matrix_and_bias(
    module: nnx.Module, name: str, options: Options, adapters: bool
) -> tuple[Matrix, jax.Array | None]:
    matrix = matrix_of(module, f"w_{name}", options, adapters)
    return matrix, getattr(module, f"b_{name}")[...] if hasattr(module, f"b_{name}") else None


def merge_adapters(module: nnx.Module, lora: Lora) -> None:
    """Merges a module's adapters of matrices [K, N] into them, and sets their b to zero."""
    own = lora.of({name: name for name in lora.targets if hasattr(module, name)})
    params: dict[str, jax.Array] = {}
    for name in own.targets:
        params |= _params(module, name, own)
    for name, value in own.merge(params).items():
        getattr(module, name)[...] = value


def _params(module: nnx.Module, name: str, lora: Lora) -> dict[str, jax.Array]:
    """A module's matrix of this name and its adapter, if it has one, by their names."""
    w = getattr(module, name)[...]
    return {name: w} | {part: getattr(module, part)[...] for part in lora.shapes({name: w.shape})}


class Mlp(nnx.Module):
    """The gated MLP of a dense layer."""

    def __init__(self, config: ModelConfig, options: Options, rngs: nnx.Rngs) -> None:
        own = options.lora.of({name: name.replace("w_dense_", "w_") for name in OF_DENSE})
        self.config, self.options = config, dataclasses.replace(options, lora=own)
        hidden = config.dense_features
        shapes = {"w_gate_up": (config.features, 2 * hidden), "w_down": (hidden, config.features)}
        set_params(self, shapes, config.init_scale, self.options, rngs)

    def __call__(self, x: jax.Array, adapters: bool = True) -> jax.Array:
        """Maps x [..., H] to the same shape; adapters: whether the matrices have their LoRA adapters."""
        activation, implementation = find_activation(self.config.dense_activation), self.options.dense_implementation
        hidden = activated(linear(self, x, "gate_up", self.options, adapters), activation, implementation)
        return linear(self, hidden, "down", self.options, adapters)
