"""Makes tests/data/models: tiny models of each family that jgg.models has, by Hugging Face's transformers.

    pip install torch transformers
    python -m tests.programs.make_model_data [FAMILY ...]
    python -m tests.programs.make_model_data [FAMILY ...] --fused
    python -m tests.programs.make_model_data [FAMILY ...] --open FOLDER

Each folder is what `save_pretrained` writes of random bfloat16 weights (a selection bias is float32, as in published
checkpoints), and reference.npz: in float32, the logits of tokens, the loss of each next token, a digest of its
gradients, the losses after steps of AdamW, and greedy continuations of prompts. fused.json, which --fused writes of
folders that are there, has the shape and a CRC of each tensor that transformers writes of the same model
with save_original_format=False. With --open, transformers opens the
folders in FOLDER, named as the families, which `jgg.models.save` wrote of what `jgg.models.load` read: they must hold
equal tensors. Made, and opened, with torch 2.13.0 and transformers 5.24.0.
"""

import argparse
import json
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Llama4ForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.programs.tiny_models import COMMON, FAMILIES, TOWERS, ZERO_CENTRED
from tests.support.digests import digest

OUT = Path(__file__).parents[1] / "data" / "models"
PROMPT_LENGTHS, NEW_TOKENS, STEPS = (1, 5, 9), 6, 3
LEAST_MARGIN = 1e-2  # between the two largest logits of a greedy choice, so that rounding changes none


def auto_class(family):
    """The class of transformers that opens the family's folders."""
    return AutoModelForImageTextToText if family in TOWERS else AutoModelForCausalLM


def new_config(family, **changes):
    """The config of a tiny model."""
    own = COMMON | FAMILIES[family] | changes
    return CONFIG_MAPPING[family](**{"text_config": own} | TOWERS[family] if family in TOWERS else own)


def as_published(family, folder):
    """Stores experts as published folders do, where transformers does not."""
    if family == "qwen3_vl_moe":
        path = folder / "model.safetensors"
        tensors = {
            name: tensor.transpose(-1, -2).contiguous() if ".experts." in name else tensor
            for name, tensor in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})


def fill(family, model, generator, scale=0.3):
    """Gives a model random weights, in bfloat16 but for a selection bias."""
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            is_norm = "norm" in name and (family not in ZERO_CENTRED or "linear_attn" in name)
            is_factor = is_norm or name.endswith("scale")
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) + is_factor)
        model.to(torch.bfloat16)
        for name, bias in sorted([*model.named_buffers(), *model.named_parameters()]):
            if name.endswith("e_score_correction_bias"):
                bias.data = 0.3 * torch.randn(bias.shape, generator=generator)
            if name.endswith("layer_scalar"):
                bias.data = 1 + 0.3 * torch.randn(bias.shape, generator=generator)


def make_folder(family, seed):
    """Writes a model with random weights in its folder."""
    model = auto_class(family).from_config(new_config(family))
    generator = torch.Generator().manual_seed(seed)
    fill(family, model, generator)
    model.save_pretrained(OUT / family)
    as_published(family, OUT / family)
    (OUT / family / "generation_config.json").unlink(missing_ok=True)
    return generator


def logits_of(model, tokens):
    """The logits of each next token; the whole model of transformers 5.24 fails for Llama 4 without an image."""
    language_model = model.language_model if isinstance(model, Llama4ForConditionalGeneration) else model
    return language_model(tokens).logits


def continued(model, prompt):
    """The tokens that greedily follow a prompt, and the least margin of a choice."""
    tokens, margin = list(prompt), np.inf
    for _ in range(NEW_TOKENS):
        first, second = logits_of(model, torch.tensor([tokens]))[0, -1].topk(2).values.tolist()
        margin = min(margin, first - second)
        tokens.append(int(logits_of(model, torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :], margin


def gradients(family, model):
    """The gradients of all parameters by the names of the folder's tensors, which transformers gives them."""
    grads = {own.data_ptr(): own.grad for own in model.parameters() if own.grad is not None}  # two names if tied
    state = {name: grads.get(tensor.data_ptr(), tensor) for name, tensor in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=state)
        as_published(family, Path(folder))
        named, own = (load_file(Path(where) / "model.safetensors") for where in (folder, OUT / family))
    # what has no gradient is as in the model; a tied head may be written too
    changed = {name: named[name] for name in named.keys() & own.keys()}
    return {name: array for name, array in changed.items() if not torch.equal(array, own[name].to(array.dtype))}


def loss_of(model, tokens):
    """The logits, and the mean loss of each next token."""
    logits = logits_of(model, tokens)
    return logits, torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 64), tokens[:, 1:].reshape(-1))


def losses_of_training(model, tokens):
    """The loss after each of some steps."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, tokens)[1].backward()
        optimizer.step()
        losses.append(loss_of(model, tokens)[1].item())
    return losses


def make(family):
    for seed in range(100):
        generator = make_folder(family, seed)
        model = auto_class(family).from_pretrained(
            OUT / family, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        prompts = [torch.randint(64, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
        with torch.no_grad():
            greedy, margins = zip(*(continued(model, prompt) for prompt in prompts), strict=True)
        if min(margins) > LEAST_MARGIN:
            break
    tokens = torch.randint(64, (2, 13), generator=generator)
    logits, loss = loss_of(model, tokens)
    loss.backward()
    of_parameters = digest({name: array.numpy() for name, array in gradients(family, model).items()})
    padded = [prompt + [0] * (max(PROMPT_LENGTHS) - len(prompt)) for prompt in prompts]
    losses = np.asarray(losses_of_training(model, tokens), np.float32)
    np.savez_compressed(
        OUT / family / "reference.npz",
        tokens=tokens.numpy().astype(np.int32),
        logits=logits.detach().numpy(),
        loss=loss.detach().numpy(),
        gradients=of_parameters,
        losses=losses,
        prompts=np.asarray(padded, np.int32),
        greedy=np.asarray(greedy, np.int32),
    )
    make_fused(family)


def make_fused(family):
    """Writes fused.json of a folder that is there."""
    model = auto_class(family).from_pretrained(OUT / family, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, save_original_format=False)
        tensors = load_file(Path(folder) / "model.safetensors")
    lines = (f"{json.dumps(name)}: {json.dumps(summary(tensor))}" for name, tensor in sorted(tensors.items()))
    (OUT / family / "fused.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def summary(tensor):
    """The shape of a tensor and a CRC of its elements in float32, which has those of all dtypes in the folder."""
    return [list(tensor.shape), zlib.crc32(tensor.contiguous().numpy())]


def check_opens(family, folder):
    """Raises unless transformers reads the same model from a folder as from the family's own."""
    got, report = auto_class(family).from_pretrained(folder / family, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    got, wanted = got.state_dict(), auto_class(family).from_pretrained(OUT / family).state_dict()
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensor.dtype == got[name].dtype and torch.equal(tensor, got[name]), name


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--open", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    folder = arguments.open
    for family in arguments.families:
        if arguments.fused:
            make_fused(family)
        elif folder is None:
            make(family)
        else:
            check_opens(family, folder)
            print(f"transformers opens {family}")


if __name__ == "__main__":
    main()
