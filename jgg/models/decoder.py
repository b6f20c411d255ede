"""`Decoder`: a whole mixture-of-experts language model in Flax NNX."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from jgg.core.arguments import as_array, as_finite, as_flag, check, check_instance
from jgg.core.choices import TARGETS
from jgg.experts.sharding import MoESharding
from jgg.linear.fp8 import Fp8
from jgg.linear.lora import Lora
from jgg.models.config import ModelConfig
from jgg.models.decoder_stacks import DecoderStacks
from jgg.models.loss import Scores, loss_of, losses_of, scores_of
from jgg.models.modules import Options, set_params
from jgg.models.stacks import new_stack
from jgg.models.token_arrays import as_tokens, as_weights, check_shape
from jgg.nnx import sow


class Decoder(DecoderStacks):
    """A decoder-only language model with mixtures of experts, as a checkpoint's config.json describes it.

    The parameters of layers with the same shapes are stacked along a first axis, and the layers run in a
    `jax.lax.scan`, so that a deep model compiles as quickly as a shallow one.

    Attributes:
      config: the ModelConfig.
      options: the other arguments, checked.
      w_embedding: nnx.Param [V, H].
      layers: the layers with experts, which have `attention_norm`, `attention` or another mixer, `mlp_norm` and `moe`,
        a `jgg.nnx.MoE`. Where their shapes differ, for example because every fourth layer has another mixer, layers of
        the same shapes are stacked, and the name of each further stack has the number of its first layer, such as
        `layers_3`. Gemma 4's layers have `mlp` alongside `moe`, and more norms.
      dense_layers: the layers without experts, which have `mlp` instead of `moe`, or None.
      norm: nnx.Param [H], of the last RMS norm.
      w_head: nnx.Param [H, V]; missing if the model uses its embedding instead.

    Args:
      config: what to build, from `jgg.models.model_config`.
      dtype: dtype of the computation: float32, bfloat16 or float16. Norms and routers compute in float32.
      param_dtype: dtype of the parameters, one of these three.
      remat: which results of the forward pass stay in memory for the backward pass, which recomputes the others.
        "none": all stay. "names": each layer keeps x, the pre-activation of its experts, the router's choice, and the
        sum of x and attention. "attention": the same without x, which is recomputed from the sum, plus the products
        that give queries, keys and values, the output of attention before its last product, and one float32 per head
        and token, so that a GPU need not attend again. Recurrent layers keep the output of their rule and the states
        before its chunks. "all": each layer keeps only its input x. "offload": the same, but in pinned memory of the
        host, to which x is copied while the layer computes. The backward pass waits for most of the copy back.
      unroll: how many layers one iteration of the scan computes, as in `jax.lax.scan`. With more, the model takes
        longer to compile and may run faster. Must be 1 with remat="offload".
      quantization: a `jgg.Fp8` to multiply the experts' products in FP8.
      lora_rank, lora_alpha: as in `jgg.nnx.MoE`; a tuple has one number per entry of lora_targets.
      lora_targets: the matrices that have LoRA adapters, where the model has such matrices: "w_q", "w_k", "w_v", "w_o",
        "w_q_a", "w_q_b", "w_kv_a" and "w_kv_b" of latent attention, "w_qkvz", "w_qkv", "w_z" and "w_out" of recurrent
        layers, the experts' "w_gate_up" and "w_down", and "w_dense_gate_up" and "w_dense_down" of dense MLPs, which
        is the default; and "w_ba", "w_b" and "w_a" of recurrent layers, "w_shared_gate_up" and "w_shared_down" of
        shared experts, and "w_router". Matrices with adapters in layers with experts get no gradient.
      lora_param_dtype: dtype of the adapters and their gradients, one of these three. Products round them to `dtype`.
      implementation: of all products with matrices, as in `jgg.grouped_gemm`. By default, on a GPU, the kernels compute
        the experts' products, norms and rotary embeddings. They also compute products with other matrices where a table
        of measurements shows that they beat XLA. With a sharding, XLA computes everything but the experts, unless
        batch_invariant is set.
      batch_invariant: on a GPU, a token's result has the same bits whatever other tokens are in the batch, and whatever
        their number, order or padding. Kernels with a fixed order of additions then compute everything. With a
        sharding, each device's sequences get the same bits on any device. Gradients are not covered. Without a GPU the
        option promises nothing.
      sharding: how a mesh of Auto axes splits the model, a `jgg.sharding.MoESharding`: experts as in `jgg.nnx.MoE`, and
        sequences over `sharding.token_axes`. With an fsdp axis, all other matrices are stored split over that axis and
        the expert axis, and each layer gathers its own in the forward pass and again in the backward pass. They are
        replicated along the other axes, including tensor, which splits only the experts. Parameters are created already
        split.
      rngs: random number generators; the stream "params" is used.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.float32,
        remat: str = "none",
        unroll: int = 1,
        quantization: Fp8 | None = None,
        lora_rank: int | tuple[int, ...] | None = None,
        lora_alpha: float | tuple[float, ...] | None = None,
        lora_targets: tuple[str, ...] = TARGETS,
        lora_param_dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        batch_invariant: bool = False,
        sharding: MoESharding | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_instance("config", config, ModelConfig, "a ModelConfig, as jgg.models.model_config returns it")
        check_instance("rngs", rngs, nnx.Rngs, "an nnx.Rngs")
        options = Options.checked(
            dtype=dtype,
            param_dtype=param_dtype,
            lora_param_dtype=lora_param_dtype,
            remat=remat,
            unroll=unroll,
            quantization=quantization,
            lora=Lora(lora_rank, lora_alpha, lora_targets),
            implementation=implementation,
            batch_invariant=batch_invariant,
            sharding=sharding,
        )
        self.config, self.options = config, options
        if not any(config.is_dense):
            self.dense_layers = None
        for plan in config.plan:
            setattr(self, plan.name, new_stack(plan, config, options, rngs))
        shapes = {"w_embedding": (config.vocabulary, config.features), "norm": (config.features,)}
        if not config.is_tied:
            shapes["w_head"] = (config.features, config.vocabulary)
        set_params(self, shapes, config.init_scale, options, rngs, norm=config.norm_init)

    def __call__(
        self,
        tokens: ArrayLike,
        segments: ArrayLike | None = None,
        *,
        topk_indices: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        adapters: bool = True,
    ) -> jax.Array:
        """Returns the logits of each next token, float32 [B, S, V], for tokens, integer [B, S] from 0 to V - 1.

        Other ids raise ValueError where their values are known. Inside a traced program they are not: there, the logits
        of such a token, and of tokens that attend to it, are NaN, and the logits of other tokens in its row may be.

        With a sharding, B must be a multiple of the number of devices that split sequences.

        Sows what each `jgg.nnx.MoE` sows, stacked over the L layers that have experts, as intermediates, which
        `nnx.capture(model, nnx.Intermediate)` collects, each in a tuple of one:

        - "group_sizes", int32 [L, E]: rows that the router gave each expert, from tokens that count;
        - "load_balancing_loss", float32 [L]: 1 where the load is even;
        - "router_z_loss", float32 [L];
        - "overflow", int32 [L]: rows that found no room in the buffers of a sharded layer;
        - "topk_indices", int32 [L, B, S, k]: the experts that each token went to, -1 where it does not count.

        Args:
          segments: integer [B, S], for rows that hold several sequences one after the other: adjacent tokens with the
            same number form one sequence. Each sequence gets the logits that it gets alone.
          topk_indices: integer [L, B, S, k], the experts of each token in each of the L layers that have experts, such
            as an earlier call sowed; -1 leaves a choice to the router. As in `jgg.route`, weights are still the
            router's. An index that is no expert, or an expert given twice for a token that counts, raises ValueError
            where the values are known. Inside a traced program they are not: there, a choice that is no expert adds
            nothing, and an expert given twice counts twice.
          mask: bool or number [B, S], False or 0 for tokens that do not count, such as padding; by default all count.
            Tokens that do not count go to no expert, cost no expert's time and count in no router's loss. Attention
            sees them like all others, so they must come after the tokens that count or be in segments of their own:
            their logits, and the logits of tokens that attend to them, depend on the mask.
          adapters: whether to use the model's LoRA adapters; False computes the model without them, such as the
            reference of a KL divergence.
        """
        tokens = as_tokens("tokens", tokens, self.config.vocabulary)
        return self.logits(self.features(tokens, segments, topk_indices, mask, adapters))

    def losses(
        self,
        tokens: ArrayLike,
        targets: ArrayLike,
        segments: ArrayLike | None = None,
        *,
        topk_indices: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        adapters: bool = True,
        temperature: float = 1.0,
        entropies: bool = False,
    ) -> jax.Array:
        """Returns the loss of each target, the negative logarithm of its probability, float32 [B, S].

        Equals the cross entropy of `model(tokens, segments)` and the targets, but the full logits never exist at once,
        and the backward pass recomputes them. With a vocabulary of 151,936, the logits of 8,192 tokens would take 5 GB,
        and their gradient as much again. `loss` is the mean, and faster to differentiate. Sows what a call sows.

        Args:
          tokens, segments, topk_indices, mask, adapters: as in a call. The mask does not leave out targets.
          targets: integer [B, S], from 0 to V - 1, the token that follows each of `tokens`. Other ids, including
            PyTorch's -100, raise ValueError; in a traced program their losses are NaN. To leave targets out, give them
            any id, and weight their losses with 0.
          temperature: what logits are divided by, greater than 0. The losses are then the negative
            `sampled_log_probabilities` of a `generate` with this temperature and without top_k, top_p, min_p.
          entropies: whether to sow "entropies" as well, float32 [B, S]: those of the distributions that the losses are
            of, in nats. They have no gradient.
        """
        tokens, targets = self._tokens_and_targets(tokens, targets)
        temperature = as_finite("temperature", temperature)
        check(temperature > 0, f"temperature must be greater than 0, got {temperature}.")
        head = dataclasses.replace(self.head, temperature=temperature)
        x = self.features(tokens, segments, topk_indices, mask, adapters)
        entropies, sharding = as_flag("entropies", entropies), self.options.sharding
        found = losses_of(x, self.w_logits(x.dtype), targets, head, sharding, entropies)
        if found.entropies is not None:
            sow(self, {"entropies": found.entropies})
        return found.losses

    def loss(
        self,
        tokens: ArrayLike,
        targets: ArrayLike,
        segments: ArrayLike | None = None,
        *,
        weights: ArrayLike | None = None,
        topk_indices: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        adapters: bool = True,
    ) -> jax.Array:
        """Returns the sum of the losses of the targets, each times its weight, float32 []; by default their mean.

        Equals `(weights * losses).sum()` with `losses`, but is faster to differentiate: the forward pass computes the
        gradients along with the losses, so the logits are computed only once. Sows what a call sows.

        Args:
          tokens, targets, segments, topk_indices, mask, adapters: as in `losses`.
          weights: number or bool [B, S], by default 1 / (B S) for all; `learned / learned.sum()` gives the mean over
            the targets where `learned` is 1. A target with the weight 0 does not count; in a traced program it may have
            any id. The gradient of the weights is the losses, or 0 where the weight is 0 and the loss is NaN.
        """
        tokens, targets = self._tokens_and_targets(tokens, targets)
        weights = as_weights("weights", weights, tokens)
        x = self.features(tokens, segments, topk_indices, mask, adapters)
        return loss_of(x, self.w_logits(x.dtype), targets, weights, self.head, self.options.sharding)

    def scores(
        self,
        tokens: ArrayLike,
        targets: ArrayLike,
        segments: ArrayLike | None = None,
        *,
        mask: ArrayLike | None = None,
        adapters: bool = True,
    ) -> Scores:
        """Returns the log-probabilities of targets, for evaluation, and whether greedy decoding picks them.

        As in `losses`, the logits of all tokens are never in memory together. Sows what a call sows. It has no
        gradients.

        Args:
          tokens, segments, mask, adapters: as in a call. All targets are scored, even where the mask is False.
          targets: integer [B, S] or [B, S, C], from 0 to V - 1: the token that may follow each token, or C
            alternatives, so that one row scores several one-token answers to the same question.

        Returns: `jgg.models.Scores`, its arrays in the shape of the targets.
        """
        tokens = as_tokens("tokens", tokens, self.config.vocabulary)
        targets = as_array("targets", targets)
        (batch, length), shape = tokens.shape, targets.shape
        is_right = shape[:2] == (batch, length) and len(shape) in (2, 3) and 0 not in shape[2:]
        check(is_right, f"targets must be [B, S] or [B, S, C], C at least 1, {[batch, length]}, got {list(shape)}.")
        alternatives = math.prod(shape[2:])
        ids = as_tokens("targets", targets.reshape(batch, length * alternatives), self.config.vocabulary)
        x = self.features(tokens, segments, None, mask, adapters)
        ids = ids.reshape(batch, length, alternatives)
        scores = scores_of(x, self.w_logits(x.dtype), ids, self.head, self.options.sharding)
        return Scores(*(each.reshape(shape) for each in scores))

    def max_logits(self, tokens: ArrayLike, segments: ArrayLike | None = None) -> dict[str, jax.Array]:
        """Returns each attention head's largest logit before the softmax, over all tokens.

        The result maps the name of each stack of layers with attention to float32 [layers, heads]; pass it to
        `jgg.optim.qk_clip`. It costs a forward pass and one more product of queries and keys.

        Args:
          tokens, segments: as in a call.

        Raises: ValueError: the model is both sharded and batch_invariant; or as a call.
        """
        check(self.options.mapped is None, "max_logits needs batch_invariant=False where the model has a sharding.")
        tokens = as_tokens("tokens", tokens, self.config.vocabulary)
        measured = nnx.capture(Decoder.features, nnx.Intermediate)
        _, sown = measured(self, tokens, segments, None, None, True, measures=True)
        end = "_max_logits"
        return {name.removesuffix(end): of[0] for name, of in nnx.to_pure_dict(sown).items() if name.endswith(end)}

    def _tokens_and_targets(self, tokens: ArrayLike, targets: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """Both as int32 [B, S]."""
        vocabulary = self.config.vocabulary
        tokens, targets = as_tokens("tokens", tokens, vocabulary), as_tokens("targets", targets, vocabulary)
        check_shape("targets", targets, tokens)
        return tokens, targets
