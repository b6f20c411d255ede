"""lm-eval with jgg's models: on tasks that are made here, with answers by the model's losses, without a network."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import jgg.models
from jgg.models import generate
from tests.support import processes
from tests.support.frameworks import framework, write_task
from tests.support.models import folder_with_tokenizer, loaded, logits_of, with_mxfp4

pytestmark = [
    *framework("lm_eval"),
    pytest.mark.usefixtures("offline"),
    # it makes sockets and files that it leaves to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
BEGIN, END = 62, 61  # what begins and ends a text; a special token's word is found within others
TEMPLATE = (
    "{% for message in messages %}t9 {{ message['content'] }} {% endfor %}{% if add_generation_prompt %}t8 {% endif %}"
)
DOCUMENTS = [
    {"question": f"t{number} t{number + 3}", "choices": ["t5", "t7", "t20"], "answer": number % 3, "text": "t4 t8 t9"}
    for number in range(10, 16)
]
TASKS = {
    "jgg_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
    "jgg_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "jgg_until": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{new}}",
        "generation_kwargs": {"until": ["t63"], "max_gen_toks": 4, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture
def folder(tmp_path):
    """A model's folder whose token 5 is the word "t5"."""
    made = folder_with_tokenizer("qwen3_moe", tmp_path / "model")
    settings = {"bos_token": f"t{BEGIN}", "eos_token": f"t{END}", "chat_template": TEMPLATE}
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def made_of(folder, **options):
    from jgg.integrations.lm_eval import JggLM

    return JggLM(folder, **{"dtype": "float32"} | options)


def instances(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, own, number) for number, own in enumerate(arguments)]


def numbers(text):
    return [int(word[1:]) for word in text.split()]


def words(tokens):
    return " ".join(f"t{token}" for token in tokens)


def logits_alone(tokens):
    """Of one sequence, [S, V]."""
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(logits_of(loaded("qwen3_moe"), jnp.asarray(padded)), np.float64)[0, : len(tokens)]


def want_of(context, own):
    """The log-probability of tokens behind others, and whether they are the likeliest."""
    logits = logits_alone((context + own)[:-1])[-len(own) :]
    values = logits[np.arange(len(own)), own] - np.log(np.exp(logits).sum(-1))
    return values.sum(), logits.argmax(-1).tolist() == own


def continued(context, new):
    """The likeliest new tokens behind one context alone, up to what ends a text."""
    padded = [[*context, *[0] * (16 - len(context))]]  # contexts of all lengths share a program
    got = generate(loaded("qwen3_moe"), padded, new, lengths=[len(context)], stop_tokens=[END])
    tokens = np.asarray(got).tolist()[0]
    return tokens[: tokens.index(END)] if END in tokens else tokens


def test_log_likelihoods(folder):
    lm = made_of(folder, batch_size="3")
    requests = [("t3 t4 t5", " t6"), ("t3 t4 t5", " t7"), ("", "t9 t10"), ("t11 ", "t12 t13"), ("t3", " t4 t5 t8 t9")]
    got = lm.loglikelihood(instances("loglikelihood", *requests), disable_tqdm=True)
    want = [want_of(numbers(context) or [BEGIN], numbers(own)) for context, own in requests]
    np.testing.assert_allclose([value for value, _ in got], [value for value, _ in want], rtol=1e-5)
    assert [is_greedy for _, is_greedy in got] == [is_greedy for _, is_greedy in want]
    assert all(type(value) is float and type(is_greedy) is bool for value, is_greedy in got)


def test_a_context_of_white_space_alone_has_the_prefix_token(folder):
    """As an empty one: lm-eval moves the white space into the continuation, and no token is left."""
    lm = made_of(folder)
    requests = [(" ", "t9 t10"), ("\n\n", "t9 t10"), ("\t", "t9"), ("", "t9")]
    got = lm.loglikelihood(instances("loglikelihood", *requests), disable_tqdm=True)
    want = [want_of([BEGIN], numbers(own)) for _, own in requests]
    np.testing.assert_allclose([value for value, _ in got], [value for value, _ in want], rtol=1e-5)
    for request in (("t3", ""), ("t3 ", " ")):  # no token to score, rather than one of probability 1
        with pytest.raises(ValueError, match=r"a continuation must have tokens behind its context, got none in \('t3"):
            lm.loglikelihood(instances("loglikelihood", request), disable_tqdm=True)


def test_rolling_log_likelihoods(folder, caplog):
    """Of a text longer than a sequence, whose last tokens see as many before them as there is room for."""
    lm = made_of(folder, max_length=5)
    text = words(range(20, 33))
    got = lm.loglikelihood_rolling(instances("loglikelihood_rolling", (text,), ("t9",)), disable_tqdm=True)
    whole = [BEGIN, *numbers(text)]
    starts = [(0, 5), (5, 5), (8, 3)]  # 13 tokens by 5, 5 and, with two before them, 3
    want = sum(want_of(whole[start : start + 6 - own], whole[start + 6 - own : start + 6])[0] for start, own in starts)
    np.testing.assert_allclose(got, [want, want_of([BEGIN], [9])[0]], rtol=1e-5)
    assert not caplog.records


def test_contexts_are_cut_from_the_left(folder, caplog):
    lm = made_of(folder, max_length=3)
    ((value, _),) = lm.loglikelihood(instances("loglikelihood", (words(range(20, 30)), " t7 t8")), disable_tqdm=True)
    np.testing.assert_allclose(value, want_of([28, 29], [7, 8])[0], rtol=1e-5)
    assert [record.getMessage() for record in caplog.records] == [
        "1 contexts are cut from the left to max_length, 3 tokens"
    ]


@pytest.mark.sweep
def test_generation_is_that_of_each_context_alone(folder):
    lm, options = made_of(folder, batch_size=2), {"until": [], "max_gen_toks": 5}
    contexts = [[3, 4, 5], [9], [10, 11, 12, 13]]
    want = [continued(context, 5) for context in contexts]
    requests = [(words(context), options) for context in contexts]
    until = {"until": [words(want[0][1:3]), "never"], "max_gen_toks": 5}
    got = lm.generate_until(instances("generate_until", *requests, (words(contexts[0]), until)), disable_tqdm=True)
    assert [numbers(text) for text in got] == [*want, want[0][:1]]
    until = {"until": [f" t{want[0][1]}", "\n"], "max_gen_toks": 5}  # which begins inside the text of no token
    (cut,) = lm.generate_until(instances("generate_until", (words(contexts[0]), until)), disable_tqdm=True)
    assert cut == words(want[0][:1])
    until = {"until": [f"t{want[0][1]}"], "max_gen_toks": 5}
    (cut,) = lm.generate_until(instances("generate_until", (words(contexts[0]), until)), disable_tqdm=True)
    assert cut == words(want[0][:1]) + " "  # all that precedes it
    cold = {"do_sample": False, "temperature": 0.0, "max_gen_toks": 5}  # greedy decoding ignores the temperature
    (greedy,) = lm.generate_until(instances("generate_until", (words(contexts[0]), cold)))
    assert numbers(greedy) == want[0][:5]
    drawn = {"do_sample": True, "temperature": 5.0, "top_k": 60, "top_p": 0.99, "max_gen_toks": 5}
    first, second = lm.generate_until(instances("generate_until", *[(words(contexts[0]), drawn)] * 2))
    assert first != second  # each repetition has a seed of its own
    with pytest.raises(ValueError, match=r"options of generation must be of until, .*, got num_beams"):
        lm.generate_until(instances("generate_until", ("t3", options | {"num_beams": 2})))
    with pytest.raises(ValueError, match="max_gen_toks must be less than max_length, 32768, got 32768"):
        lm.generate_until(instances("generate_until", ("t3", {"max_gen_toks": 2**15})))


def test_parameters_in_mxfp4_count_as_numbers(folder, tmp_path):
    stored = with_mxfp4(tmp_path / "stored")
    models = (jgg.models.load(stored, experts=experts) for experts in ("dense", "as stored"))
    dense, packed = (made_of(folder, model=model).get_model_info()["model_num_parameters"] for model in models)
    assert dense == packed


@pytest.fixture
def tasks(tmp_path):
    """A folder with the tasks, whose answers to be generated are right for all documents but one."""
    data = tmp_path / "data.jsonl"
    rows = [{**row, "new": words(continued(numbers(row["question"]), 4))} for row in DOCUMENTS]
    rows[2]["new"] = "t0"
    data.write_text("\n".join(map(json.dumps, rows)))
    made = tmp_path / "tasks"
    made.mkdir()
    for name, settings in TASKS.items():
        write_task(made, name, data, **settings)
    return made


@pytest.mark.sweep
def test_tasks_and_the_cache_of_answers(folder, tasks, tmp_path, monkeypatch):
    import lm_eval
    from lm_eval.tasks import TaskManager

    import jgg.integrations.lm_eval as ours

    def evaluated():
        return lm_eval.simple_evaluate(
            model="jgg",
            model_args={"pretrained": str(folder), "dtype": "float32"},
            tasks=list(TASKS),
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            use_cache=str(tmp_path / "answers"),
            bootstrap_iters=0,
        )

    found = evaluated()
    results = {name: own for task in found["results"].values() for name, own in task.items()}
    right = []
    for row in DOCUMENTS:
        values = [want_of(numbers(row["question"]), numbers(choice))[0] for choice in row["choices"]]
        right.append(np.argmax(values) == row["answer"])
    assert 0 < np.mean(right) < 1
    assert results["acc,none"] == np.mean(right)
    texts = [numbers(f"{row['question']} {row['text']}") for row in DOCUMENTS]
    total = sum(want_of([BEGIN], text)[0] for text in texts)
    np.testing.assert_allclose(results["word_perplexity,none"], np.exp(-total / sum(map(len, texts))), rtol=1e-5)
    assert results["exact_match,none"] == 5 / 6
    assert found["config"]["model_dtype"] == "float32"
    monkeypatch.setattr(ours, "score", None)
    monkeypatch.setattr(ours, "batches", None)
    assert evaluated()["results"] == found["results"]


def test_chat_templates(folder, tasks):
    import lm_eval
    from lm_eval.tasks import TaskManager

    lm = made_of(folder)
    assert lm.chat_template(True) == TEMPLATE
    found = lm_eval.simple_evaluate(
        model=lm,
        tasks=["jgg_choice"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        apply_chat_template=True,
        bootstrap_iters=0,
        limit=2,
    )
    for sample, row in zip(found["samples"]["jgg_choice"], DOCUMENTS, strict=False):
        context = [9, *numbers(row["question"]), 8]
        want = [want_of(context, numbers(choice))[0] for choice in row["choices"]]
        np.testing.assert_allclose([float(own[0]) for own in sample["filtered_resps"]], want, rtol=1e-5)


@pytest.mark.sweep
def test_the_command_of_lm_eval(folder, tasks, tmp_path):
    output = tmp_path / "output.json"
    command = ["-m", "jgg.integrations.lm_eval", "--model", "jgg", "--tasks", "jgg_choice"]
    command += ["--model_args", f"pretrained={folder},dtype=float32", "--include_path", str(tasks)]
    done = processes.run(*command, "--output_path", str(output), "--batch_size", "auto")
    assert "|jgg_choice|" in done
    (written,) = tmp_path.glob("output*.json")
    assert "acc,none" in json.loads(written.read_text())["results"]["jgg_choice"]


def test_what_is_wrong_is_said(folder):
    for options, message in (
        ({"experts": "int8"}, "experts must be of bfloat16, as-stored, fp8, mxfp4, got 'int8'"),
        ({"batch_size": 0}, "batch_size must be a positive int, got 0"),
        ({"max_length": 0}, "max_length must be a positive int, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            made_of(folder, **options)
    (folder / "tokenizer_config.json").write_text("{}")
    lm = made_of(folder)
    with pytest.raises(ValueError, match=r"must have eos_token_id in generation_config\.json, got none"):
        lm.loglikelihood(instances("loglikelihood", ("", "t3")))


def test_caches_in_fp8(folder):
    lm = made_of(folder, cache_dtype="float8_e4m3fn")
    requests = instances("generate_until", ("t3 t4 t5", {"until": [], "max_gen_toks": 4}))
    (text,) = lm.generate_until(requests, disable_tqdm=True)
    new = generate(loaded("qwen3_moe"), [[3, 4, 5]], 4, cache_dtype="float8_e4m3fn")[0].tolist()
    assert numbers(text) == new[: len(numbers(text))] != []
    with pytest.raises(TypeError, match=r"cache_dtype must be one of float8_e4m3fn, got float16."):
        made_of(folder, cache_dtype="float16")
