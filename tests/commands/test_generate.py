"""`jgg generate`: what it prints of a model's texts, where prompts come from, and what it refuses."""

import io
import json
import sys

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GenerationConfig

import jgg.models
from jgg.cli import main
from jgg.cli.generation import run, speaker
from jgg.cli.generation.settings import MAX_NEW_TOKENS, settings_of
from tests.support.models import DATA, folder_with_tokenizer
from tests.support.processes import ROOT

TEMPLATE = (
    "<s>{% for m in messages %} {{ m.role }} {{ m.content }}{% if m.role == 'assistant' %} </s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} assistant{% endif %}"
)
SPECIAL = {"<s>": 0, "system": 1, "user": 2, "assistant": 3, "</s>": 4}


@pytest.fixture(autouse=True)
def promotion():
    """Users have not forbidden it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose token 5 is the word "t5"; no file says how it generates."""
    return folder_with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    """The same with a chat template; the tokenizer puts "<s>" before texts, as the template does."""
    folder = folder_with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("chat") / "model")
    words = SPECIAL | {f"t{token}": token for token in range(5, 64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t5"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def generate(capsys):
    """Runs the command in this process; what it printed."""

    def run_command(*arguments):
        assert main(["generate", *map(str, arguments)]) == 0
        return capsys.readouterr().out

    return run_command


def words(tokens):
    return " ".join(f"t{token}" for token in tokens)


def settings(folder, *arguments):
    from jgg.cli.parsing import parse

    return settings_of(parse(["generate", str(folder), *arguments]), folder)


# what generation_config.json says
FILES = [
    {},
    {"do_sample": False, "temperature": 0.6, "top_k": 20},
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "max_new_tokens": 9},
    {"do_sample": True, "top_k": None, "repetition_penalty": 1.05, "stop_strings": ["a", "b"]},
    {"repetition_penalty": 1.2, "stop_strings": "a", "top_k": 0},
]


@pytest.mark.parametrize("content", FILES)
def test_settings_are_those_of_transformers(content, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    config = GenerationConfig.from_pretrained(tmp_path)
    defaults = GenerationConfig._get_default_generation_params()

    def wanted(name, other=None):
        value = getattr(config, name)
        return defaults.get(name, other) if value is None else value

    got = settings(tmp_path)
    assert got.temperature == (wanted("temperature") if wanted("do_sample") else 0)
    for name in ("top_k", "top_p", "repetition_penalty"):
        assert getattr(got, name) == wanted(name), name
    assert got.min_p == wanted("min_p", 0.0)
    assert got.max_new_tokens == content.get("max_new_tokens", MAX_NEW_TOKENS)
    assert list(got.stop) == list(wanted("stop_strings", ()))
    assert got.presence_penalty == got.frequency_penalty == 0


def test_options_count_more_than_the_file(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(FILES[3]))
    given = ["--temperature", "0", "--top-k", "0", "--min-p", "0.5", "--stop", "x", "--max-new-tokens", "3"]
    got = settings(tmp_path, *given, "--presence-penalty", "-1.5")
    assert (got.temperature, got.top_k, got.top_p, got.min_p, got.max_new_tokens) == (0, 0, 0.95, 0.5, 3)
    assert (got.stop, got.presence_penalty, got.drawing()["top_k"]) == (("x",), -1.5, None)
    (tmp_path / "generation_config.json").unlink()
    assert settings(tmp_path, "--temperature", "0.7").top_k == 50  # as transformers, once it draws


WRONG_FILES = {
    "temperature of {} must be at least 0, got -1.0": {"temperature": -1},
    "top_k of {} must be an int, got 0.5": {"top_k": 0.5},
    "top_p of {} must be a number, got 'a'": {"top_p": "a"},
    "max_new_tokens of {} must be at least 1, got 0": {"max_new_tokens": 0},
    "do_sample of {} must be True or False, got 1": {"do_sample": 1},
    "stop_strings of {} must be a text, a list of texts or null, got ['']": {"stop_strings": [""]},
}


@pytest.mark.parametrize("message", WRONG_FILES)
def test_a_wrong_file_is_named(message, tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(WRONG_FILES[message]))
    with pytest.raises((TypeError, ValueError)) as raised:
        settings(tmp_path)
    assert message.format(path) in str(raised.value)


@pytest.mark.parametrize(
    ("adapter", "experts"),
    [
        pytest.param([], "bfloat16", id="base-bfloat16"),
        pytest.param(
            [str(ROOT / "tests/data/model_adapters/qwen3_moe")], "fp8", marks=pytest.mark.sweep, id="adapter-fp8"
        ),
    ],
)
def test_a_text_ends_at_the_folder_s_stop_token(adapter, experts, generate, tmp_path):
    folder = folder_with_tokenizer("qwen3_moe", tmp_path / "model")
    options = {"experts": jgg.Fp8()} if experts == "fp8" else {}
    model = jgg.models.load(folder, **options)
    if adapter:
        jgg.models.load_adapter(model, adapter[0])
    new = jgg.models.generate(model, [[5, 6, 7]], 5)[0].tolist()
    stop = new[3]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop]}))
    arguments = ["--prompt", "t5 t6 t7", "--max-new-tokens", "5", "--experts", experts]
    printed = generate(folder, *adapter, *arguments)
    assert printed == f" {words(new[: new.index(stop)])}\n".replace(" \n", "\n")


@pytest.mark.sweep
def test_samples_end_at_a_text_which_may_end_inside_a_token(folder, generate):
    draws = {"temperature": 1.0, "top_k": 9, "key": jax.random.fold_in(jax.random.key(3), 0), "num_samples": 2}
    new = jgg.models.generate(jgg.models.load(folder), [[5, 6, 7]], 5, **draws).tolist()
    (one, two), (_, three) = new[0][:2], new[1][:2]
    stop = f"{one} t{two}"[:-1]  # begins inside the first token of the first sample, and ends inside the second
    arguments = ["--prompt", "t5 t6 t7", "--max-new-tokens", "5", "--stop", stop, "--stop", words([three, 64])]
    drawing = ["--temperature", "1", "--top-k", "9", "--samples", "2", "--prefill-chunk", "2", "--seed", "3"]
    texts = [f" {words(row)}".partition(stop)[0] for row in new]
    assert texts[0] == " t"
    assert generate(folder, *arguments, *drawing) == f"--- 1 of 2\n t\n--- 2 of 2\n{texts[1]}\n"
    printed = json.loads(generate(folder, *arguments, *drawing, "--json", "--speed"))
    assert [sample["text"] for sample in printed["samples"]] == texts
    reasons = ["stop", "stop" if stop in words(new[1]) else "length"]
    assert [sample["finish_reason"] for sample in printed["samples"]] == reasons
    assert [sample["tokens"] for sample in printed["samples"]] == new
    assert (printed["prompt"], printed["prompt_tokens"], printed["adapter"]) == ("t5 t6 t7", 3, None)
    assert printed["speed"]["prefill"] > 0 and printed["speed"]["decode"] > 0


def test_caches_in_fp8(folder, generate, capsys):
    new = jgg.models.generate(jgg.models.load(folder), [[5, 6, 7]], 5, cache_dtype="float8_e4m3fn")[0].tolist()
    arguments = ["--prompt", "t5 t6 t7", "--max-new-tokens", "5", "--cache-dtype"]
    (sample,) = json.loads(generate(folder, *arguments, "float8_e4m3fn", "--json"))["samples"]
    assert sample["tokens"] == new[: len(sample["tokens"])] != []
    with pytest.raises(SystemExit):
        main(["generate", str(folder), *arguments, "fp8"])
    assert "argument --cache-dtype: invalid choice: 'fp8'" in capsys.readouterr().err
    latents = DATA / "deepseek_v3"
    with pytest.raises(SystemExit):
        main(["generate", str(latents), *arguments, "float8_e4m3fn"])
    assert "cache_dtype must be None with latent attention" in capsys.readouterr().err


class Terminal(io.StringIO):
    """A stream that notes what is written at once."""

    def __init__(self):
        super().__init__()
        self.pieces = [""]

    def write(self, text):
        self.pieces[-1] += text
        return super().write(text)

    def flush(self):
        self.pieces.append("")


def test_a_text_is_printed_as_it_comes(folder, generate, monkeypatch, capsys):
    whole = generate(folder, "--prompt", "t5 t6 t7", "--max-new-tokens", "9", "--repetition-penalty", "1.5")
    assert len(whole.split()) == 9
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    given = ["--prompt", "t5 t6 t7", "--max-new-tokens", "9", "--repetition-penalty", "1.5", "--speed"]
    assert main(["generate", str(folder), *given]) == 0
    assert terminal.getvalue() == whole
    assert [len(piece.split()) for piece in terminal.pieces[:3]] == [1, run.CHUNK, run.CHUNK]
    assert capsys.readouterr().err.startswith("prefill: ")


@pytest.mark.sweep
def test_options_come_from_a_file(folder, generate, tmp_path):
    path, adapter = tmp_path / "run.toml", str(ROOT / "tests/data/model_adapters/qwen3_moe")
    given = {"adapter": adapter, "max-new-tokens": 5, "prompt": "t5 t6 t7", "json": True, "stop": ["x", "y"]}
    path.write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in given.items()))
    with pytest.raises(SystemExit):
        main(["generate", "--config", str(path)])
    path.write_text(path.read_text() + f"\nmodel = {json.dumps(str(folder))}")
    document = json.loads(generate("--config", path, "--seed", "1"))
    assert (document["model"], document["adapter"]) == (str(folder), adapter)
    assert len(document["samples"][0]["tokens"]) == 5
    assert settings(folder, "--config", str(path), "--max-new-tokens", "3").stop == ("x", "y")
    path.write_text("json = false")
    assert not generate(folder, "--config", path, "--prompt", "t5", "--max-new-tokens", "1").startswith("{")


def standard_input(monkeypatch, content):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_prompts_come_from_files_and_standard_input(folder, generate, monkeypatch, tmp_path):
    shared = folder, "--max-new-tokens", "5"
    wanted = generate(*shared, "--prompt", "t5 t6 t7")
    (tmp_path / "prompt.txt").write_bytes(b"t5 t6\nt7\r\n")
    assert generate(*shared, "--prompt-file", tmp_path / "prompt.txt") == wanted
    standard_input(monkeypatch, b"t5 t6 t7\n")
    assert generate(*shared) == wanted


@pytest.fixture
def prompts(monkeypatch):
    """The prompts that the model is given."""
    seen, stream = [], jgg.models.stream

    def noting(model, tokens, *arguments, lengths=None, **options):
        seen.append(np.asarray(tokens)[0, : None if lengths is None else lengths[0]].tolist())
        return stream(model, tokens, *arguments, lengths=lengths, **options)

    monkeypatch.setattr(jgg.models, "stream", noting)
    return seen


def tokens_of(text):
    return [SPECIAL.get(word) if word in SPECIAL else int(word[1:]) for word in text.split()]


@pytest.mark.sweep
def test_a_conversation_keeps_what_was_said(chat_folder, generate, prompts, monkeypatch):
    standard_input(monkeypatch, "t9\n\n  \nt10 \u00e9\n".encode())
    shared = "--chat", "--max-new-tokens", "5", "--repetition-penalty", "1.5"
    first, second = generate(chat_folder, *shared, "--system", "t8").splitlines()
    assert len(first.split()) == 5
    # one "<s>", which both the tokenizer and the template put there
    asked = "<s> system t8 user t9 assistant"
    said = f"{asked} {first} </s> user t10 t5 assistant"
    assert prompts == [tokens_of(asked), tokens_of(said)]
    alone = generate(chat_folder, *shared, "--system", "t8", "--prompt", "t9")
    assert alone == f"{first}\n" and prompts[2] == prompts[0]
    document = json.loads(generate(chat_folder, *shared, "--prompt", said.removeprefix("<s> system"), "--json"))
    assert prompts[3][:2] == [0, 2] and document["prompt_tokens"] == len(prompts[3])
    assert second.split()


def test_an_interrupt_ends_an_answer_but_not_the_conversation(chat_folder, generate, prompts, monkeypatch):
    standard_input(monkeypatch, b"t9\nt10\n")
    texts = speaker.Speaker.texts

    def interrupted(self, ids, stream):
        pieces = texts(self, ids, stream)
        yield next(pieces)
        if len(prompts) == 1:
            raise KeyboardInterrupt
        yield from pieces

    monkeypatch.setattr(speaker.Speaker, "texts", interrupted)
    shared = "--chat", "--max-new-tokens", "5", "--repetition-penalty", "1.5"
    first, second = generate(chat_folder, *shared).splitlines()
    assert len(first.split()) == 1 < len(second.split())
    assert prompts[1] == tokens_of(f"<s> user t9 assistant {first} </s> user t10 assistant")


def mistake(capsys, *arguments):
    """What the command says of arguments that it refuses."""
    with pytest.raises(SystemExit) as raised:
        main(["generate", *map(str, arguments)])
    assert raised.value.code == 2
    told = capsys.readouterr()
    assert not told.out and told.err.count("\n") == 1
    return told.err.strip().removeprefix("jgg generate: error: ")


MISTAKES = {
    "--system must be given with --chat, got it alone": ["--system", "x", "--prompt", "t5"],
    "--json must be given with --prompt or --prompt-file in a --chat, got neither": ["--chat", "--json"],
    "--samples must be given with --prompt or --prompt-file in a --chat, got neither": ["--chat", "--samples", 2],
    "--stop must be a text, got ''": ["--stop", "", "--prompt", "t5"],
    "--prompt must have a token, got ''": ["--prompt", ""],
    "a conversation needs chat_template.jinja in the model's folder": ["--chat", "--prompt", "t5"],
    "argument --top-p: must be greater than 0 and at most 1, got 0.0": ["--top-p", 0],
    "argument --prompt-file: not allowed with argument --prompt": ["--prompt", "a", "--prompt-file", "b"],
    "--prompt-file must be a file that can be read, got none.txt: No such": ["--prompt-file", "none.txt"],
    "--prompt: 'utf-8' codec can't encode": ["--prompt", "\udc80"],
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_told_in_a_line(message, folder, capsys):
    assert mistake(capsys, folder, *MISTAKES[message]).startswith(message)


def test_what_is_wrong_with_files_is_told_in_a_line(folder, capsys, monkeypatch, tmp_path):
    standard_input(monkeypatch, b"caf\xe9")
    assert mistake(capsys, folder) == "standard input must be UTF-8, got the byte 0xe9"
    monkeypatch.setattr(sys, "stdin", None)
    assert mistake(capsys, folder).startswith("--prompt, --prompt-file or standard input must give a prompt, got none")
    assert mistake(capsys, tmp_path / "none", "--prompt", "t5").startswith("MODEL must be a model's folder")
    assert mistake(capsys, folder, tmp_path, "--prompt", "t5").startswith("ADAPTER must be a folder with adapter_conf")
    damaged = folder_with_tokenizer("qwen3_moe", tmp_path / "damaged")
    model = jgg.models.load(folder)
    model.w_embedding[...] = model.w_embedding[...].at[5].set(np.nan)
    monkeypatch.setattr(jgg.models, "load", lambda *_, **__: model)
    assert mistake(capsys, damaged, "--prompt", "t5") == "the model's logits are NaN after 0 new tokens"
    tokenizer = Tokenizer(models.WordLevel({"t0": 0, "t5": 64}, unk_token="t0"))
    tokenizer.save(str(damaged / "tokenizer.json"))
    assert mistake(capsys, damaged, "--prompt", "t5").startswith(
        "--prompt must have tokens below the model's vocab_size"
    )
