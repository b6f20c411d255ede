"""Folders with small tokenizers and chat templates, and what is learned of rows by them."""

import itertools
import json

import jgg.data
from tests.support import tokenizers

USER, ASSISTANT = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
LOOP = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# the text before and in what LOOP has of an assistant's turn
WHOLE = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n", "two<|im_end|>\n"


def folder_of(tmp_path, make=tokenizers.byte_level, template=None, **settings):
    """A folder with a tokenizer, whose config.json ends texts by "</s>"."""
    make().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    settings = {"bos_token": "<s>", "eos_token": "</s>"} | settings
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


def jsonl(folder, *rows, name="data.jsonl"):
    """A file with rows, or with unchanged bytes."""
    path = folder / name
    path.write_bytes(rows[0] if rows and isinstance(rows[0], bytes) else "\n".join(map(json.dumps, rows)).encode())
    return path


def examples(folder, *rows):
    """The pieces of each example of some rows, and which of them are learned."""
    tokenizer = jgg.data.load_tokenizer(folder)
    (end, *_) = jgg.data.stop_tokens(folder)
    return [
        (tokenizer.convert_ids_to_tokens(example.tokens.tolist()), example.learned.tolist())
        for _, row in jgg.data.rows(jsonl(folder, *rows))
        for example in jgg.data.examples_of(row, tokenizer, end)
    ]


def spans(folder, *rows):
    """The text of each example of some rows in parts, in turns one that is not learned and one that is."""
    decode, found = jgg.data.load_tokenizer(folder).convert_tokens_to_string, []
    for pieces, learned in examples(folder, *rows):
        cuts = [0, *(n for n in range(1, len(pieces)) if learned[n] != learned[n - 1]), len(pieces)]
        parts = [decode(pieces[a:b]) for a, b in itertools.pairwise(cuts)]
        found.append(("", *parts) if learned[0] else tuple(parts))
    return found
