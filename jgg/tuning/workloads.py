"""The GEMMs that are tuned and measured, from well-known MoE layers or the user's own, and data for them."""

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jgg.core.arguments import as_precision
from jgg.core.choices import FP8
from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import E4M3
from jgg.linear.fp8 import quantize_tokens, quantize_weights

_DIRICHLET = 1 / 0.09
type Arrays = dict[str, jax.Array]  # of products in FP8, x and w are QuantizedArrays

_LAYERS = Path(__file__).parent / "layers.json"


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes of an MoE layer with a gated MLP on one device.

    Attributes:
      tokens: T, tokens per step on one device.
      hidden: H, features of a token.
      expert_intermediate: I, hidden features of an expert.
      experts: E, experts on the device.
      topk: k, experts per token.
    """

    name: str
    tokens: int
    hidden: int
    expert_intermediate: int
    experts: int
    topk: int

    def __post_init__(self):
        if not isinstance(self.name, str):
            raise ValueError(f"name of a layer must be text, got {self.name!r}.")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or not 0 < value < 2**31):
                raise ValueError(f"{field.name} of layer {self.name!r} must be a positive int32, got {value!r}.")
        if self.topk > self.experts:
            raise ValueError(
                f"topk of layer {self.name!r} must be at most its {self.experts} experts, got {self.topk}."
            )

    def __str__(self):
        sizes = f"H {self.hidden}, I {self.expert_intermediate}, E {self.experts}, k {self.topk}"
        return f"{self.name}: {self.tokens} tokens for each device, {sizes}"

    def gemms(self, **options) -> dict[str, GroupedGemmProblem]:
        """The layer's products: "up" [H -> 2 * I] and "down" [I -> H]; options as in `gemm`."""
        sizes = {"num_rows": self.tokens * self.topk, "num_experts": self.experts, "topk": self.topk}
        return {
            "up": gemm(in_features=self.hidden, out_features=2 * self.expert_intermediate, **sizes, **options),
            "down": gemm(in_features=self.expert_intermediate, out_features=self.hidden, **sizes, **options),
        }


def gemm(
    *,
    num_rows,
    in_features,
    out_features,
    num_experts,
    topk=1,
    dtype: Any = "bfloat16",
    w_layout="enk",
    permute_x=False,
    permute_y=False,
    weighted=False,
    biased=False,
    precision=None,
) -> GroupedGemmProblem:
    """Makes the problem of a grouped GEMM from its sizes; rows are in expert order unless options say otherwise.

    Args:
      dtype: dtype of x and w, bfloat16 by default. With "fp8", x and w are quantized and y is in bfloat16.
    """
    dtype = E4M3 if dtype == FP8 else jnp.dtype(dtype)
    if num_rows % topk:
        raise ValueError(f"num_rows must be a multiple of topk, {topk}, got {num_rows}.")
    return GroupedGemmProblem(
        num_rows=num_rows,
        num_experts=num_experts,
        in_features=in_features,
        out_features=out_features,
        topk=topk,
        dtype=dtype,
        out_dtype=jnp.dtype("bfloat16") if dtype == E4M3 else dtype,
        w_layout=w_layout,
        permute_x=permute_x,
        permute_y=permute_y,
        has_topk_weights=weighted,
        has_bias=biased,
        precision=as_precision(precision),
        is_quantized=dtype == E4M3,
    )


def computed_as(op: str, problem: GroupedGemmProblem) -> tuple[str, GroupedGemmProblem]:
    """Returns the op and the problem that compute an op of `problem`; they differ from it only for dX in FP8.

    dX of quantized operands is computed as a forward product with the transposed w, so K and N are exchanged.
    """
    if op != "dx" or problem.dtype != E4M3:
        return op, problem
    return "forward", dataclasses.replace(problem, in_features=problem.out_features, out_features=problem.in_features)


def load_layers(path: str | Path | None = None) -> dict[str, Layer]:
    """Layers by name from a JSON file {"layers": [{"name": ..., "tokens": ..., ...}]}, by default those that jgg knows.

    Other keys than `Layer`'s attributes are ignored.

    Raises: ValueError: the file is not JSON of this form; the message names the file.
    """
    path = Path(path or _LAYERS)
    names = [field.name for field in dataclasses.fields(Layer)]
    try:
        entries = json.loads(path.read_text())["layers"]
        layers = [Layer(**{name: entry[name] for name in names}) for entry in entries]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        what = f"no key {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} must be a JSON file with a list of layers, each with {names}: {what}") from error
    return {layer.name: layer for layer in layers}


def group_sizes(kind: str, num_rows: int, num_experts: int, seed: int = 0) -> np.ndarray:
    """Rows of each expert, int32 [E], whose sum is num_rows.

    Args:
      kind: "uneven" (drawn from a Dirichlet distribution: for 65,536 rows over 128 experts about 160 to 1,070),
        "even", "one" (all rows in the first group) or "some-empty" (uneven, and every fourth expert without rows).
    """
    rng = np.random.default_rng(seed)
    shares = np.ones(num_experts)
    if kind in ("uneven", "some-empty"):
        shares = rng.dirichlet(shares * _DIRICHLET)
    if kind == "some-empty":
        shares[3::4] = 0
    if kind == "one":
        shares[1:] = 0
    if kind == "even":
        return np.diff(np.arange(num_experts + 1) * num_rows // num_experts).astype(np.int32)
    return rng.multinomial(num_rows, shares / shares.sum()).astype(np.int32)


def operands(problem: GroupedGemmProblem, groups: str = "uneven", seed: int = 0) -> Arrays:
    """Random x, w, dy, group_sizes and, where the problem has them, gather_indices, topk_weights and bias.

    For a problem in FP8, x and w are QuantizedArrays, and there is no dy. Their scales are powers of two, so that
    bfloat16 can hold the same numbers.
    """
    keys = jax.random.split(jax.random.key(seed), 5)
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
    dtype = problem.out_dtype if problem.is_quantized else problem.dtype
    x = normal(keys[0], problem.x_shape, dtype)
    w = normal(keys[1], problem.w_shape, dtype) * jnp.asarray(problem.in_features**-0.5, dtype)
    if problem.is_quantized:
        quantized = {"x": quantize_tokens(x, power_of_2_scales=True), "w": quantize_weights(w, power_of_2_scales=True)}
        arrays = cast(Arrays, quantized)
    else:
        arrays = {"x": x, "w": w, "dy": normal(keys[2], problem.y_shape, dtype)}
    arrays["group_sizes"] = jnp.asarray(group_sizes(groups, problem.num_rows, problem.num_experts, seed))
    if problem.permute_x or problem.permute_y:
        arrays["gather_indices"] = jax.random.permutation(keys[3], problem.num_rows).astype(jnp.int32)
    if problem.has_topk_weights:
        arrays["topk_weights"] = jax.random.uniform(keys[4], (problem.num_rows,), minval=0.1)
    if problem.has_bias:
        arrays["bias"] = jnp.ones((problem.num_experts, problem.out_features), dtype)
    return arrays


def gathered_rows(problem: GroupedGemmProblem, arrays: Arrays) -> jax.Array:
    """The rows of x in expert order, [M, K]."""
    return arrays["x"][arrays["gather_indices"] // problem.topk] if problem.permute_x else arrays["x"]
