"""A hook of mkdocs: what search engines and the site's own search know of a page: title, description, weight."""

import re

# of pages whose headings say too little among those of other sites
TITLES = {
    "index.md": "Fine-tune, train and run MoE models in JAX",
    "guide.md": "Guide: grouped GEMM and MoE layers in JAX",
    "in-your-model.md": "MoE layers in your own Flax model",
    "optimizers.md": "Muon for MoE models in JAX",
    "models.md": "Hugging Face MoE models in JAX",
    "train.md": "Train a new MoE model in JAX",
    "data.md": "Data for training: JSONL, parquet, chat templates, packing",
    "generate.md": "Generate text with MoE models in JAX",
    "evaluate.md": "Evaluate MoE models: perplexity and lm-eval's tasks",
    "reinforcement-learning.md": "Reinforcement learning of MoE models in JAX (GRPO)",
    "save.md": "Save, resume and restore MoE models",
    "supported.md": "What is supported: features, GPUs, model families",
    "serve.md": "Serve models and LoRA adapters with vLLM and SGLang",
    "scaling.md": "Expert parallelism and FSDP on several GPUs",
    "fp8.md": "FP8 training of MoE layers",
    "performance.md": "Speed of grouped GEMMs and MoE models",
    "migrate.md": "From ragged_dot, tokamax, MegaBlox, Unsloth and megablocks",
}
# The site's search multiplies a page's score by its weight. The changelog names everything: it comes last.
WEIGHTS = {"changelog.md": 0.1, "api/": 0.5, "troubleshooting.md": 0.7, "development.md": 0.5, "reliability.md": 0.5}
WEIGHTS |= {"fine-tune.md": 2.0, "index.md": 1.5}
_LONGEST = 160  # characters of a description that search engines show


def on_page_markdown(markdown: str, *, page, config, files) -> None:
    """Sets the page's title for browsers and search engines, its description, and its weight in the site's search."""
    path = page.file.src_path
    is_reference = path.startswith("api/")
    title = TITLES.get(path, f"{page.title}: reference" if is_reference else None)
    if title is not None:
        page.meta.setdefault("title", title)
    own = f"Arguments, shapes, dtypes and errors of {page.title}." if is_reference else description(markdown)
    page.meta.setdefault("description", own or f"{page.title}: {config.site_description}")
    for beginning, weight in WEIGHTS.items():
        if path.startswith(beginning):
            page.meta.setdefault("search", {"boost": weight})


def description(markdown: str) -> str:
    """The first sentences of a page, without marks, or "" if it does not begin with a paragraph."""
    blocks = re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL).split("\n\n")
    paragraphs = (block.strip() for block in blocks if block.strip() and not block.lstrip().startswith("# "))
    first = next(paragraphs, "")
    if re.match(r"[#|!:<`-]|--8<--", first) and not re.match(r"`\w", first):
        return ""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(first.split())).replace("`", "").replace("**", "")
    sentences = re.split(r"(?<=[.]) (?=[A-Z0-9])", text)
    shown = sentences[0]
    for sentence in sentences[1:]:
        if len(shown) + 1 + len(sentence) > _LONGEST or not sentence.endswith("."):  # what a list goes on with
            break
        shown += f" {sentence}"
    return shown
