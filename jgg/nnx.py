"""Flax NNX layers; `import jgg.nnx` needs Flax (`pip install 'jgg[flax]'`)."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes, initializers

from jgg.moe import moe_mlp
from jgg.routing import route

_default_init = initializers.lecun_normal()
# experts are a batch of matrices: the fan-in of [E, in, out] is in
_default_expert_init = initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))


class MoE(nnx.Module):
    """A mixture-of-experts layer: a softmax router and SwiGLU experts, dropless.

    Computes `y[t] = sum over the chosen experts e of p[t, e] * (silu(x[t] @ gate_e) * (x[t] @ up_e)) @ down_e` with
    p the router's top-k weights. The router computes in float32.

    Example:
      >>> import jax, jgg.nnx
      >>> from flax import nnx
      >>> layer = jgg.nnx.MoE(64, 128, num_experts=8, topk=2, rngs=nnx.Rngs(0))
      >>> layer(jax.numpy.ones((2, 16, 64))).shape
      (2, 16, 64)

    Args:
      in_features: H, of x and y.
      hidden_features: I, of each expert.
      num_experts: E.
      topk: k, experts per token.
      normalize: divide a token's k router weights by their sum.
      dtype: of the computation; by default promoted from x and the parameters.
      param_dtype: of the parameters.
      precision: as in `jgg.grouped_gemm`.
      kernel_init: initializer of w_gate_up [E, H, 2 * I] and w_down [E, I, H].
      router_init: initializer of the router's kernel [H, E].
      implementation: as in `jgg.grouped_gemm`.
      rngs: random number generators; the stream "params" is used.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        num_experts: int,
        topk: int,
        normalize: bool = True,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init=_default_expert_init,
        router_init=_default_init,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        if not 1 <= topk <= num_experts:
            raise ValueError(f"topk must be between 1 and num_experts, {num_experts}, got {topk}.")
        shapes = (num_experts, in_features, 2 * hidden_features), (num_experts, hidden_features, in_features)
        self.w_gate_up, self.w_down = (nnx.Param(kernel_init(rngs.params(), shape, param_dtype)) for shape in shapes)
        self.router = nnx.Linear(
            in_features,
            num_experts,
            use_bias=False,
            dtype=jnp.float32,
            param_dtype=param_dtype,
            kernel_init=router_init,
            rngs=rngs,
        )
        self.num_experts = num_experts
        self.topk = topk
        self.normalize = normalize
        self.dtype = dtype
        self.precision = precision
        self.implementation = implementation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to x [..., H]; the result has the shape of x.

        Sows the intermediate "group_sizes" int32 [E], the rows that each expert got.
        """
        tokens = x.reshape(-1, x.shape[-1])
        routing = route(self.router(tokens), self.topk, normalize=self.normalize)
        self.sow(nnx.Intermediate, "group_sizes", routing.group_sizes, capture_noop=True)
        tokens, w_gate_up, w_down = dtypes.promote_dtype(
            (tokens, self.w_gate_up[...], self.w_down[...]), dtype=self.dtype
        )
        y = moe_mlp(
            tokens,
            w_gate_up,
            w_down,
            routing,
            w_layout="ekn",
            precision=self.precision,
            implementation=self.implementation,
        )
        return y.reshape(x.shape)
