"""Serves small models that `jgg.models.save` wrote with vLLM, and compares log-probabilities with those of jgg.

    python -m tests.programs.serve_models make FOLDER [FAMILY ...]    # needs torch and transformers
    python -m tests.programs.serve_models save FOLDER [FAMILY ...]    # needs jgg
    python -m tests.programs.serve_models serve FOLDER [FAMILY ...]   # needs vLLM, 0.32.0 on a CPU

The families are those of make_model_data, in sizes that vLLM takes and with the options of published models where vLLM
knows no others. `make` writes each by transformers in FOLDER/transformers. `save` loads these by jgg, saves them in
FOLDER/jgg, and scores a prompt and its greedy continuation in float32. `serve` opens FOLDER/jgg, or with --folders
transformers the other one, in vLLM, and prints the greatest and the mean difference of the log-probabilities of the
same tokens. Families of BFLOAT16 are served in bfloat16: `save` prints how far jgg in bfloat16 is from jgg in float32.
"""

import argparse
import importlib
import os
import signal
import traceback
from pathlib import Path

import numpy as np

PROMPT = np.random.default_rng(0).integers(0, 256, 48).tolist()
NEW_TOKENS, SECONDS = 16, 120
BFLOAT16 = "deepseek_v3", "glm4_moe_lite", "qwen3_next", "qwen3_5_moe_text"
SIZES = {  # of keys that a family has
    "vocab_size": 256,
    "hidden_size": 128,
    "head_dim": 32,
    "global_head_dim": 64,
    "rotary_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "moe_intermediate_size": 64,
    "intermediate_size": 64,
    "intermediate_size_mlp": 128,
    "shared_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "sliding_window": 16,
    "attention_chunk_size": 32,
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
RECURRENT = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
AFTER_ONE_DENSE = {"first_k_dense_replace": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]}
# keys that published configs have and transformers does not write, and options that vLLM 0.32.0 would not follow
PUBLISHED = {
    "olmoe": {"clip_qkv": None, "attention_bias": False},
    "gpt_oss": {"swiglu_limit": 7.0},
    "mellum": {"num_nextn_predict_layers": 0},
    "qwen3_vl_moe": {
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    },
    "llama4": {
        "num_hidden_layers": 4,
        "interleave_moe_layer_step": 2,
        "moe_layers": [1, 3],
        "attn_temperature_tuning": False,
    },
    "hy_v3": AFTER_ONE_DENSE | {"expert_hidden_dim": 64, "attention_bias": False, "qk_norm": True, "route_norm": True},
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True},
    "qwen2_moe": {"use_sliding_window": False, "layer_types": ["full_attention"] * 4},
    "deepseek_v3": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "glm4_moe_lite": AFTER_ONE_DENSE
    | {"topk_method": "noaux_tc", "q_lora_rank": 32, "rope_interleave": True, "tie_word_embeddings": False},
    "qwen3_next": RECURRENT | {"attention_bias": False},
    "qwen3_5_moe_text": RECURRENT,
}
_SMALL_PATCHES = {"patch_size": 2, "temporal_patch_size": 2, "merge_size": 2}
PROCESSORS = {
    "qwen3_vl_moe": {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast"} | _SMALL_PATCHES,
        "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor"} | _SMALL_PATCHES,
    },
    "llama4": {"preprocessor_config.json": {"image_processor_type": "Llama4ImageProcessorFast"}},
}
WITHOUT_IMAGES = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
OPTIONS = {  # of vLLM
    "qwen3_vl_moe": WITHOUT_IMAGES,
    "llama4": WITHOUT_IMAGES | {"block_size": 32},  # chunks are whole blocks
    # vLLM's own kernel gives other numbers for rotary embeddings of latent attention without YaRN
    "glm4_moe_lite": {"compilation_config": {"custom_ops": ["none"]}},
}


def make(family, folder):
    """Writes a model of transformers with random weights, and a tokenizer."""
    import json

    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    from tests.programs import make_model_data as tiny

    own = tiny.COMMON | tiny.FAMILIES[family]
    changes = {key: size for key, size in SIZES.items() if own.get(key) is not None}
    changes |= {"max_position_embeddings": 512} | PUBLISHED.get(family, {})
    config = tiny.new_config(family, **changes)
    if family == "qwen3_vl_moe":
        config.vision_config.out_hidden_size = changes["hidden_size"]
    model = tiny.auto_class(family).from_config(config)
    tiny.fill(family, model, torch.Generator().manual_seed(0), scale=0.15)
    if family == "ernie4_5_moe":  # the bias of the choice of experts, which vLLM leaves out on a CPU
        for layer in model.model.layers[1:3]:
            layer.mlp.gate.moe_statics.e_score_correction_bias.data.zero_()
    out = folder / "transformers" / family
    model.save_pretrained(out)
    tiny.as_published(family, out)
    words = Tokenizer(WordLevel({str(token): token for token in range(256)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(out)
    for name, content in PROCESSORS.get(family, {}).items():
        (out / name).write_text(json.dumps(content))
    return "made"


def save(family, folder):
    """Saves a model by jgg and writes its greedy tokens and the log-probabilities of all tokens."""
    import jax
    import jax.numpy as jnp

    import jgg.models

    def scored(dtype, tokens=None):
        model = jgg.models.load(out, dtype=dtype, show_progress=False)
        if tokens is None:
            tokens = PROMPT + list(jgg.models.generate(model, [PROMPT], max_new_tokens=NEW_TOKENS, temperature=0.0)[0])
        scores = jax.nn.log_softmax(jax.jit(model)(jnp.asarray([tokens], jnp.int32))[0].astype(jnp.float32))
        return tokens, np.asarray(scores)[np.arange(len(tokens) - 1), tokens[1:]]

    out = folder / "jgg" / family
    jgg.models.save(jgg.models.load(folder / "transformers" / family, show_progress=False), out)
    tokens, scores = scored(jnp.float32)
    np.savez(folder / f"{family}.npz", tokens=np.asarray(tokens, np.int32), scores=scores)
    return difference(scored(jnp.bfloat16, tokens)[1], scores) + " in bfloat16" if family in BFLOAT16 else "saved"


def difference(scores, expected):
    """The greatest and the mean difference, in words."""
    apart = np.abs(scores - expected[: len(scores)])
    return f"differs by at most {apart.max():.1e}, on average {apart.mean():.1e}"


def serve(family, folder):
    """Compares what vLLM computes with what `save` wrote, as far as the greedy tokens are the same."""
    from vllm import LLM, SamplingParams

    expected = np.load(folder.parent / f"{family}.npz")
    tokens = expected["tokens"].tolist()
    llm = LLM(
        str(folder / family),
        dtype="bfloat16" if family in BFLOAT16 else "float32",
        max_model_len=256,
        max_num_seqs=2,
        enforce_eager=True,
        **OPTIONS.get(family, {}),
    )
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    (result,) = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
    (output,) = result.outputs
    got = PROMPT + list(output.token_ids)
    same = next((i for i, pair in enumerate(zip(got, tokens, strict=True)) if pair[0] != pair[1]), len(tokens))
    by_token = [*result.prompt_logprobs[1:], *output.logprobs]
    scores = np.asarray([by_token[i][tokens[i + 1]].logprob for i in range(same - 1)])
    return f"{difference(scores, expected['scores'])}, {same - len(PROMPT)} of {NEW_TOKENS} new tokens are the same"


def in_own_process(work, family, folder):
    """What `work` returns, or its error, from a process that inherits what is imported and may hang or die."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        signal.alarm(SECONDS)
        try:
            line = work(family, folder)
        except BaseException as error:
            traceback.print_exc()
            line = f"{type(error).__name__}: {error}".splitlines()[0]
        os.write(write, line.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(process, 0)
    with os.fdopen(read) as file:
        return file.read() or f"ended, or took {SECONDS} s"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["make", "save", "serve"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--folders", choices=["jgg", "transformers"], default="jgg")
    arguments = parser.parse_args()
    folder = arguments.folder
    if arguments.step == "make":
        everything = importlib.import_module("tests.programs.tiny_models").FAMILIES
    else:
        everything = sorted(path.name for path in (folder / "transformers").iterdir())
    if arguments.step == "serve":
        os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"})
        importlib.import_module("vllm.v1.engine.llm_engine")
        folder = folder / arguments.folders
    work = {"make": make, "save": save, "serve": serve}[arguments.step]
    lines = []
    for family in arguments.families or everything:
        is_apart = arguments.step == "serve"
        line = in_own_process(work, family, folder) if is_apart else work(family, folder)
        lines.append(f"{family}: {line}")
        print(lines[-1], flush=True)
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
