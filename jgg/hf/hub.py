"""`download` fetches a model from the Hugging Face Hub; `folder_of` finds the folder for a path or a model's name."""

import re
from pathlib import Path

from jgg.core.arguments import as_path, check

# org/name, as the Hub has them
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# what a folder holds for other programs in addition to weights: tokenizer, chat template, processors, and their code
FILES = (
    "*.model",
    "*.py",
    "*.tiktoken",
    "*processor_config.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer*",
    "vocab.*",
)
_WEIGHTS = "config.json", "*.safetensors", "*.safetensors.index.json"
# The first are in folders of their own, which hold the same weights in other formats; so do the second.
_NEVER = "*/*", "consolidated*"
_GGUF = (
    "jgg reads safetensors, not GGUF, whose weights are rounded for llama.cpp: take the model that the GGUF was made "
    "of, or write one by transformers' from_pretrained(..., gguf_file=...) and save_pretrained."
)


def download(name: str, *, revision: str | None = None) -> Path:
    """Fetches a model from the Hugging Face Hub into its cache, and returns the folder.

    Fetches config.json, safetensors files, the tokenizer and similar files. Subfolders of the repository and other
    formats are left out. Files already in the cache are not fetched again, and can be used without a network.
    huggingface_hub chooses the cache (`HF_HOME`), and uses the token of `hf auth login` or `HF_TOKEN`.

    Args:
      name: the model's name on the Hub, such as "openai/gpt-oss-20b".
      revision: a branch, a tag or a commit; by default the newest.

    Raises:
      ImportError: huggingface_hub is not installed.
      FileNotFoundError: the Hub has no such model or revision, or does not show it to you.
      PermissionError: the model is gated, and its owner has not let you in.
      ConnectionError: the Hub cannot be reached, and the cache lacks a part of the model.
      ValueError: name is no name of a model, or a model in GGUF.
    """
    check(isinstance(name, str) and _NAME.fullmatch(name) is not None, f"name must be 'owner/model', got {name!r}.")
    check("gguf" not in name.lower(), f"name must be a model in safetensors, got {name!r}: {_GGUF}")
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ImportError(f"{name} needs huggingface_hub to be fetched: pip install 'jgg[train]'.") from error
    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=[*_WEIGHTS, *FILES], ignore_patterns=list(_NEVER)
        )
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{name} is gated: ask for access at https://huggingface.co/{name}, then `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{name} must be a folder here or a model of the Hugging Face Hub, got neither. If the model is private, "
            "`hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"revision of {name} must be one of the Hub, got {revision!r}.") from error
    except errors.LocalEntryNotFoundError as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ConnectionError(
            f"{name} is no folder here, is not whole in the Hub's cache, and the Hub cannot be reached: {reason}"
        ) from error
    return Path(folder)


def folder_of(folder: str | Path) -> Path:
    """The folder at a path or, if there is none and the path looks like "owner/model", the folder of the Hub's model.

    Raises:
      ValueError: it is a GGUF file, or a folder that has GGUF files but no safetensors files.
      OSError: as `download`.
    """
    path = as_path("folder", folder)
    if not path.exists() and _NAME.fullmatch(str(folder)):
        return download(str(folder))
    found = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if found and not any(path.glob("*.safetensors")):
        raise ValueError(f"folder must have safetensors files, got {found[0]}: {_GGUF}")
    return path
