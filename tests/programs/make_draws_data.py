"""Makes tests/data/draws.npz: what transformers' logits processors leave, and greedy tokens with a repetition penalty.

    pip install torch transformers
    python -m tests.programs.make_draws_data

Made with torch 2.13.0 and transformers 5.24.0, in float32.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.generation import logits_process

DATA = Path(__file__).parents[1] / "data"
PROMPT_LENGTHS, PENALTY, NEW_TOKENS, LEAST_MARGIN = (1, 5, 9), 1.7, 12, 1e-3
SETTINGS = {"repetition": (1.0, 1.3, 0.8), "temperature": (1.0, 0.7, 1.9), "top_k": (64, 20, 40)}
SETTINGS |= {"top_p": (1.0, 0.9, 0.7), "min_p": (0.0, 0.02, 0.2)}


def processed(logits: torch.Tensor, tokens: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [1, V] of a row after the penalty, and after all processors in the order of `generate`."""
    own = {name: numbers[row] for name, numbers in SETTINGS.items()}
    penalized = logits_process.RepetitionPenaltyLogitsProcessor(own["repetition"])(tokens, logits)
    scores = penalized
    for processor in (
        logits_process.TemperatureLogitsWarper(own["temperature"]),
        logits_process.TopKLogitsWarper(own["top_k"]),
        logits_process.TopPLogitsWarper(own["top_p"]),
        logits_process.MinPLogitsWarper(own["min_p"]),
    ):
        scores = processor(tokens, scores)
    return penalized, scores


def greedy(prompts: np.ndarray) -> np.ndarray:
    """The tokens of the model qwen3_moe with a repetition penalty, int [3, NEW_TOKENS]."""
    model = AutoModelForCausalLM.from_pretrained(DATA / "models" / "qwen3_moe", dtype=torch.float32)
    rows = []
    for prompt, length in zip(prompts, PROMPT_LENGTHS, strict=True):
        ids = torch.tensor(prompt[None, :length])
        got = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            repetition_penalty=PENALTY,
            max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True,
            output_scores=True,
        )
        best = torch.stack(got.scores).topk(2, dim=-1).values
        assert (best[..., 0] - best[..., 1]).min() > LEAST_MARGIN, "rounding could change a token"
        rows.append(got.sequences[0, length:].numpy())
    return np.stack(rows)


def main() -> None:
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(0, 2, (3, 64)).astype(np.float32))
    tokens = rng.integers(0, 64, (3, 12))
    pairs = [processed(logits[row : row + 1], torch.tensor(tokens[row : row + 1]), row) for row in range(3)]
    with np.load(DATA / "models" / "qwen3_moe" / "reference.npz") as file:
        prompts = file["prompts"]
    np.savez_compressed(
        DATA / "draws.npz",
        logits=logits.numpy(),
        tokens=tokens,
        penalized=torch.cat([penalized for penalized, _ in pairs]).numpy(),
        scores=torch.cat([scores for _, scores in pairs]).numpy(),
        greedy=greedy(prompts),
        penalty=PENALTY,
        **{name: np.asarray(numbers) for name, numbers in SETTINGS.items()},
    )


if __name__ == "__main__":
    main()
