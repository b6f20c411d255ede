"""The model of `jgg demo`: config.json and a tokenizer of bytes."""

from typing import Any

HEAD_DIM, NUM_BYTES = 64, 256
_BALANCE_WEIGHT = 0.1


def config_of(args: Any) -> dict[str, Any]:
    """The content of config.json, of the family Qwen3-MoE."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": NUM_BYTES,
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // HEAD_DIM,
        "num_key_value_heads": args.hidden // HEAD_DIM,
        "head_dim": HEAD_DIM,
        "num_experts": args.experts,
        "num_experts_per_tok": args.topk,
        "moe_intermediate_size": args.hidden,
        "norm_topk_prob": args.topk > 1,
        "router_aux_loss_coef": _BALANCE_WEIGHT / args.topk,
        "hidden_act": "silu",
        "initializer_range": args.hidden**-0.5,
        "rms_norm_eps": 1e-6,
        # windows are short: with a base of 500 rather than 10,000 the model learned faster
        "rope_theta": 500.0,
        # no byte attends further back than in training, however long the text becomes
        "use_sliding_window": True,
        "sliding_window": args.seq,
        "max_window_layers": 0,
        "tie_word_embeddings": False,
    }


def _tokenizer() -> dict[str, Any]:
    """The content of tokenizer.json: byte-level BPE without merges, so that a token is the value of its byte.

    Source: the characters that stand for bytes are those of Radford et al., GPT-2, 2019.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {characters[byte]: byte for byte in range(NUM_BYTES)}, "merges": []},
    }
