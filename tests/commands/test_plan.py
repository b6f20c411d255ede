"""`jgg finetune --plan` says what a step needs, part by part, as the loaded model and the compiled step have it."""

import argparse
import re

import jax
import numpy as np
import pytest
from flax import nnx

import jgg.models
import jgg.optim.small_states
import jgg.train.loop
from jgg.cli import main
from jgg.cli.training import plan
from jgg.core.program_memory import Memory, planned_memory
from jgg.core.quantized import QuantizedArray
from jgg.train import planning, steps
from jgg.train.planning import Plan
from tests.support.fp8_folders import dense_folder, with_fp8
from tests.support.models import DATA, folder_with_tokenizer, with_mxfp4

FOLDERS = {
    "bfloat16": lambda folder: DATA / "qwen3_moe",
    "MXFP4": lambda folder: with_mxfp4(folder / "gpt_oss"),
    "FP8": lambda folder: with_fp8(dense_folder("qwen3_moe", folder / "qwen3_moe"), folder / "fp8"),
}
SMALL = "--sequence-length", "64", "--batch-size", "2", "--lora-rank", "2", "--targets", "w_q", "w_down"


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Runs a command with --plan; returns the exit code and, for each plan, the arguments and the result of `plan`."""
    (tmp_path / "data.jsonl").write_text("")  # no row is read
    places = "--data", str(tmp_path / "data.jsonl"), "--output", str(tmp_path / "out")

    def run(*options):
        found = []

        def spy(*args, **more):
            found.append((args, more, planning.plan(*args, **more)))
            return found[-1][-1]

        monkeypatch.setattr(plan, "plan", spy)
        code = main([*options, *places, "--plan"])
        assert {path.name for path in tmp_path.glob("out*")} == set()
        return code, found

    return run


@pytest.fixture
def programs(monkeypatch, stored):
    """The steps that are compiled, by their text: the same one only once, and to save time of "bfloat16" alone."""
    found = {}
    stats = {f"{part}_size_in_bytes": 0 for part in ("argument", "output", "alias", "temp", "host_temp")}
    empty = argparse.Namespace(memory_analysis=lambda: argparse.Namespace(**stats))

    class Lowered:
        def __init__(self, *args):
            self.lowered = steps.lowered(*args)

        def compile(self):
            # arrays that are not bound to a device have no place
            text = re.sub(r"sdy.sharding = #sdy.sharding<@empty_mesh, \[[^]]*\]>", "", self.lowered.as_text())
            text = re.sub(r" \{\}|(?<=\{), ", "", text)
            return found.get(text) or found.setdefault(text, self.lowered.compile() if stored == "bfloat16" else empty)

    for module in (planning, jgg.train.loop):
        monkeypatch.setattr(module, "lowered", Lowered)
    return found


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize("stored", FOLDERS)
def test_a_plan_is_what_the_step_needs(stored, planned, programs, tmp_path, capsys):
    folder = FOLDERS[stored](tmp_path)
    code, found = planned("finetune", str(folder), "--experts", "as-stored", *SMALL)
    (((_, optimizer, loss, batch), more, own),) = found
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "this is what XLA plans for cpu, whose memory has no limit that JAX knows"
    assert lines[-2].split() == ["total", f"{own.total / 2**30:.2f}"]
    assert code == 0

    lora = {"lora_rank": 2, "lora_alpha": 32.0, "lora_targets": ("w_q", "w_down")}
    model = jgg.models.load(folder, experts="as stored", remat="names", **lora)
    assert isinstance(model.layers.moe.w_down.get_value(), QuantizedArray) == (stored != "bfloat16")
    trainer = jgg.train.Trainer(model, optimizer, loss, accumulate=True, **more)
    trainer._prepared(jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), batch))
    assert len(programs) == 1  # the planned step is the one that trains
    moe, bytes_of = model.layers.moe, planning.num_bytes
    assert own.experts == bytes_of([moe.w_gate_up.get_value(), moe.w_down.get_value()])
    assert own.adapters == bytes_of(nnx.state(model, nnx.LoRAParam))
    assert own.others + own.experts + own.adapters == bytes_of(nnx.state(model))
    assert own.optimizer == bytes_of(trainer._opt_state) == 2 * own.adapters + 8  # and two counts
    if stored != "bfloat16":
        return
    memory = planned_memory(trainer._run)
    assert own.total == pytest.approx(memory.total, rel=0.05)
    assert own.kept + own.rest == pytest.approx(memory.temporaries, rel=0.05)
    assert 0 < own.kept < memory.temporaries


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_states_in_8_bits_are_counted(optimizer, planned, monkeypatch):
    monkeypatch.setattr(planning, "planned_memory", lambda _: Memory(0, 0, 0))
    monkeypatch.setattr(planning, "lowered", lambda *_: argparse.Namespace(compile=lambda: None))
    monkeypatch.setattr(jgg.optim.small_states, "_LEAST_SIZE", 1)
    sizes = []
    for states in ("float32", "8bit"):
        options = "--full", "--optimizer", optimizer, "--optimizer-states", states
        _, found = planned("finetune", str(DATA / "qwen3_moe"), *options)
        sizes.append(found[0][2].optimizer)
    model = jgg.models.load(DATA / "qwen3_moe", dtype="bfloat16", abstract=True)
    params = nnx.state(model, nnx.Param)
    masters = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    # Muon has one moment for most; what stays float32 is small
    assert sizes[0] - masters == pytest.approx({"adamw": 2, "muon": 1.2}[optimizer] * masters, rel=0.2)
    assert (sizes[0] - masters) / 4 < sizes[1] - masters < (sizes[0] - masters) / 3


@pytest.mark.usefixtures("optax_promotion")
def test_a_plan_of_updates_in_the_backward_pass(planned, capsys):
    folder = DATA / "qwen3_moe"
    _, found = planned("finetune", str(folder), "--full", "--remat", "all", "--optimizer-in-backward", *SMALL)
    (((_, optimizer, loss, batch), more, own),) = found
    model = jgg.models.load(folder, remat="all")
    weights = planning.num_bytes(nnx.state(model))
    trainer = jgg.train.Trainer(model, optimizer, loss, accumulate=True, **more)
    trainer._prepared(jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), batch))
    assert own.total == pytest.approx(planned_memory(trainer._run).total, rel=0.05)
    assert own.experts + own.others == weights
    assert own.optimizer == planning.num_bytes(trainer._opt_state)
    hidden, layers = model.config.features, 2
    assert own.kept >= layers * 2 * 64 * hidden * 2  # what each layer takes, in bfloat16


GIB = 2**30


@pytest.fixture
def tried(monkeypatch, planned, capsys):
    """The lines that are printed on a device of 8 GiB, where `needs(args)` says how many GiB a step needs."""

    def run(needs, *options, experts=2):
        device = argparse.Namespace(device_kind="NVIDIA X", memory_stats=lambda: {"bytes_limit": 8 * GIB})
        local_devices = jax.local_devices
        monkeypatch.setattr(jax, "local_devices", lambda **of: local_devices(**of) if of else [device])

        def plan_of(args, describe, wrt):
            describe(args)
            rest = needs(args) - experts - 3
            return Plan(experts * GIB, GIB, 0, GIB, GIB, rest * GIB, GIB * (args.remat == "offload"))

        monkeypatch.setattr(plan, "_plan_of", plan_of)
        code, _ = planned(*options)
        return code, capsys.readouterr().out.splitlines()

    return run


def test_what_fits_is_told(tried):
    code, lines = tried(lambda args: 8, "finetune", str(DATA / "qwen3_moe"), "--remat", "offload")
    assert [re.split(r"  +", line) for line in lines] == [
        ["memory of a step", "GiB"],
        ["weights of the experts", "2.00"],
        ["other weights", "1.00"],
        ["state of the optimizer", "1.00"],
        ["kept for the backward pass", "1.00"],
        ["gradients and what else the step computes", "3.00"],
        ["total", "8.00"],
        ["NVIDIA X has, for JAX", "8.00"],
        ["in the host's memory", "1.00"],
        ["it fits"],
    ]
    assert code == 0


def test_the_first_option_that_fits_is_named(tried, tmp_path):
    """Options are tried one by one, those that need less than the given ones, then all together, and shorter."""
    folder = str(DATA / "qwen3_moe")
    all_tried = [
        "it does not fit",
        "with --remat all: 9.00 GiB: it does not fit",
        "with --remat offload: 9.00 GiB, and 1.00 GiB in the host's memory: it does not fit",
        "with --experts fp8: 9.00 GiB: it does not fit",
        "with --experts mxfp4: experts='mxfp4' needs a multiple of 32 rows of w_down, got 8.",
        "with --optimizer-states 8bit: 9.00 GiB: it does not fit",
        "with --batch-size 1 --accumulate 12: 9.00 GiB: it does not fit",
        "with --sequence-length 1024: 9.00 GiB: it does not fit",
    ]
    code, lines = tried(lambda args: 9, "finetune", folder, "--accumulate", "3")
    assert (code, lines[8:16]) == (1, all_tried)
    together = (
        "with --remat offload --experts fp8 --optimizer-states 8bit --batch-size 1 --accumulate 12 --sequence-length"
    )
    on_host = "and 1.00 GiB in the host's memory"
    assert lines[16:] == [
        f"{together} 1024: 9.00 GiB, {on_host}: it does not fit",
        f"{together} 512: 9.00 GiB, {on_host}: it does not fit",  # and saves nothing
    ]
    code, lines = tried(lambda args: 7.75 + args.sequence_length / 1024, "finetune", folder, "--accumulate", "3")
    assert code == 1
    assert lines[16:] == [
        f"{together} 1024: 8.75 GiB, {on_host}: it does not fit",
        f"{together} 512: 8.25 GiB, {on_host}: it does not fit",
        f"{together} 256: 8.00 GiB, {on_host}: it fits",
    ]
    code, lines = tried(lambda args: 9 - (args.batch_size == 1), "finetune", folder, "--accumulate", "3")
    assert lines[8:] == [*all_tried[:6], "with --batch-size 1 --accumulate 12: 8.00 GiB: it fits"]
    assert code == 1
    options = "--remat", "offload", "--full", "--batch-size", "1"
    _, lines = tried(lambda args: 9 - args.optimizer_in_backward, "finetune", folder, *options)
    small = "with --optimizer-states 8bit"
    shorter = small, "with --sequence-length 1024", *(f"{small} --sequence-length {n}" for n in (1024, 512))
    assert lines[9:] == [
        "it does not fit",
        *(f"{each}: 9.00 GiB, {on_host}: it does not fit" for each in shorter),
        "with --remat all --optimizer-states 8bit --optimizer-in-backward: 8.00 GiB: it fits",
    ]
    options = "--remat", "all", "--full", "--optimizer-in-backward"
    both = small.replace("with", "with --remat offload")
    _, lines = tried(lambda args: 9, "finetune", folder, *options)
    assert [line.split(":")[0] for line in lines[9:]] == [
        "with --remat offload",
        small,
        "with --batch-size 1",
        "with --sequence-length 1024",
        *(f"{both} --batch-size 1 --sequence-length {length}" for length in (1024, 512)),
    ]
    _, lines = tried(lambda args: 9 - (args.experts == "as-stored"), "finetune", str(FOLDERS["MXFP4"](tmp_path)))
    assert lines[-1] == "with --experts as-stored: 8.00 GiB: it fits"
    new = str(folder_with_tokenizer("qwen3_moe", tmp_path / "new"))
    _, lines = tried(lambda args: 9 - (args.remat == "all"), "train", new)
    assert lines[-1] == "with --remat all: 8.00 GiB: it fits"


def test_what_no_shorter_sequence_makes_less_is_told(tried):
    options = "finetune", str(DATA / "qwen3_moe"), "--remat", "offload"
    alone = "parameters and the state of the optimizer alone take 9.00 GiB"
    _, lines = tried(lambda args: 11, *options, experts=7)
    assert lines[-1] == f"{alone}: take fewer --targets or a smaller --lora-rank"
    assert "--sequence-length 1024: 11.00 GiB" in lines[-2]
    _, lines = tried(lambda args: 11, *options, "--full", experts=7)
    assert lines[-1] == alone
