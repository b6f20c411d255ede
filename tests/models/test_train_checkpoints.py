"""Checkpoints of `jgg.train.Trainer`: damage, other dtypes, runs in one folder, and the time that they take."""

import gc
import os
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgg.train import Trainer, TrainingError, loop, state
from jgg.train.digests import digests_of
from tests.models.test_train import Line, batch_of, loss, trainer, values
from tests.support import processes

pytestmark = pytest.mark.usefixtures("optax_promotion")


def flipped(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def wide(seed=0):
    """Parameters that are large enough to be files of their own, and random keys."""

    class Wide(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(64, 96, rngs=nnx.Rngs(seed))
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))

    def distance(model, x):
        value = jnp.mean(jnp.square(model.dropout(model.linear(x))))
        return value, value

    return Trainer(Wide(), optax.adam(0.1), distance)


def row(step):
    return np.random.default_rng(step).normal(size=(4, 64)).astype(np.float32)


@pytest.mark.thorough
def test_no_bit_that_is_flipped_in_a_file_restores_other_values(tmp_path):
    own = wide()
    list(own.fit(row, 2, checkpoints=tmp_path))
    wanted, rng, told = [np.asarray(a).tobytes() for a in jax.tree.leaves(plain(own))], random.Random(0), set()
    for path in sorted(path for path in (tmp_path / "2").rglob("*") if path.is_file()):
        content = path.read_bytes()
        for bit in rng.sample(range(8 * len(content)), 6 if len(content) > 10_000 else 2):
            path.write_bytes(flipped(content, bit))
            other = wide(seed=1)
            try:
                list(other.fit(row, 2, checkpoints=tmp_path))
            except TrainingError:
                told.add(path)
            else:  # Orbax does not read all that it writes, and not every bit of what is compressed matters
                assert [np.asarray(a).tobytes() for a in jax.tree.leaves(plain(other))] == wanted, (path, bit)
        path.write_bytes(content)
        assert len(content) < 10_000 or path in told, path
    assert len(told) > 3


def test_damage_of_many_arrays_is_one_error(tmp_path, caplog, capfd):
    """Orbax wrote a traceback for each array that was read after the first of them."""

    def own():
        model = Line()
        model.more = nnx.List([nnx.Param(jnp.ones((3, size))) for size in range(20)])
        return Trainer(model, optax.adam(0.1), loss)

    list(own().fit(batch_of, 1, checkpoints=tmp_path))
    manifest = tmp_path / "1/state/manifest.ocdbt"
    manifest.write_bytes(flipped(manifest.read_bytes(), 8 * 62 + 3))
    with pytest.raises(TrainingError, match=r"got .*/1: DATA_LOSS"):
        list(own().fit(batch_of, 1, checkpoints=tmp_path))
    gc.collect()
    assert not caplog.records and capfd.readouterr().err == ""


def plain(own):
    """All that is saved, with the numbers of random keys."""
    arrays = own._arrays()
    is_key = {name: jnp.issubdtype(array.dtype, jax.dtypes.prng_key) for name, array in arrays.items()}
    return {name: jax.random.key_data(array) if is_key[name] else array for name, array in arrays.items()}


DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int4", "uint32", "bool", "complex64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_digests_tell_numbers_and_their_places_apart(dtype):
    numbers = np.arange(24).reshape(2, 3, 4) % 8
    one_less = np.where(np.arange(24).reshape(2, 3, 4) == 23, 0, numbers)
    arrays = {"own": numbers, "same": numbers, "one": one_less, "order": numbers[..., ::-1], "zeros": 0 * numbers}
    found = digests_of({name: jnp.asarray(own, jnp.float32).astype(dtype) for name, own in arrays.items()})
    assert found["own"] == found["same"] and len(set(found.values())) == len(arrays) - 1


def test_a_checkpoint_of_another_dtype_or_shape_is_named(tmp_path):
    list(trainer().fit(batch_of, 2, checkpoints=tmp_path / "run"))
    for value, wanted in ((jnp.ones(3, jnp.bfloat16), "bfloat16"), (jnp.ones(4), "float32")):
        model = Line()
        model.w.set_value(value)
        message = rf"got .*run/2: model\.w is float32 \[3\], and {wanted} \[{value.size}\] here$"
        with pytest.raises(TrainingError, match=message):
            list(Trainer(model, optax.adamw(0.1), loss).fit(batch_of, 3, checkpoints=tmp_path / "run"))
    other = Trainer(Line(), optax.sgd(0.1, momentum=0.9), loss)
    with pytest.raises(TrainingError, match=r"optimizer\.0\.trace\..* is missing, and float32"):
        list(other.fit(batch_of, 3, checkpoints=tmp_path / "run"))
    list(other.fit(batch_of, 1))  # what could not be restored changed nothing


@pytest.mark.parametrize("dtype", ["int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3", "float8_e8m0fnu"])
def test_numbers_of_few_bits_are_saved(dtype, tmp_path):
    found = []
    for number in (3.0, 0.5):
        model = Line()
        model.small = nnx.BatchStat(jnp.asarray([[0, 1, 2, number]], jnp.float32).astype(dtype))
        list(Trainer(model, optax.adam(0.1), loss).fit(batch_of, 1, checkpoints=tmp_path))
        assert model.small.dtype == dtype
        found.append(np.asarray(model.small[...]).tobytes())
    assert found[0] == found[1]


class Dotted(nnx.Module):
    """Variables whose names have dots and others."""

    def __init__(self, own, value=0.0):
        self.own = nnx.Dict({name: nnx.Param(jnp.full(2, value + number)) for number, name in enumerate(own)})
        self.own["a"] = nnx.Dict({"b": nnx.Param(jnp.full(2, value - 1))})

    def values(self):
        return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(self)))


def of_all(model, _):
    value = sum(jnp.sum(jnp.square(param)) for param in jax.tree.leaves(nnx.state(model)))
    return value, value


def fitted(model, folder):
    own = Trainer(model, optax.adam(0.1), of_all)
    list(own.fit(batch_of, 2, checkpoints=folder))
    return own


def check_restored(names, folder):
    own = fitted(Dotted(names), folder)
    other = fitted(Dotted(names, 5.0), folder)
    jax.tree.map(np.testing.assert_array_equal, own.model.values(), other.model.values())
    jax.tree.map(np.testing.assert_array_equal, own._opt_state, other._opt_state)


def test_variables_whose_names_have_dots_are_all_saved(tmp_path):
    check_restored(("a.b", "a%2Eb", "a%b", "", ".", "a/b"), tmp_path)


def test_names_with_dots_of_earlier_checkpoints_are_read(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(state, "_escaped", str)
        before = fitted(Dotted(("c.d", "e%")), tmp_path / "run")
        fitted(Dotted(("a.b",)), tmp_path / "lost")
    after = fitted(Dotted(("c.d", "e%"), 5.0), tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, before.model.values(), after.model.values())
    with pytest.raises(TrainingError, match=r"model\.own\.a%2Eb is missing, and float32 \[2\] here"):
        fitted(Dotted(("a.b",)), tmp_path / "lost")


def test_arrays_without_numbers_are_saved(tmp_path):
    for steps in (1, 2):
        model = Line()
        model.none = nnx.Param(jnp.zeros((0, 3)))
        assert len(list(Trainer(model, optax.adam(0.1), loss).fit(batch_of, steps, checkpoints=tmp_path))) == 1
    assert model.none.shape == (0, 3)


def test_a_folder_has_one_run_at_a_time(tmp_path):
    options = {"every": (1,), "checkpoints": tmp_path / "run"}
    first = trainer().fit(batch_of, 4, **options)
    next(first)
    message = r"a folder that no other run uses, got .*/run: process \d+ on .* since .* uses it"
    with pytest.raises(TrainingError, match=message):
        next(trainer().fit(batch_of, 4, **options))
    assert [record.step for record in first] == [2, 3, 4]
    assert [record.step for record in trainer().fit(batch_of, 5, **options)] == [5]


_HOLDER = """
import os, sys, time
from pathlib import Path
from jgg.train.locks import folder_lock

with folder_lock(Path(sys.argv[1])) as other:
    if os.fork():
        print(other, flush=True)
    time.sleep(100)
"""


def test_a_run_that_is_killed_leaves_no_lock(tmp_path):
    """Nor does a child that it forked and that lives on."""
    process = processes.start("-W", "ignore", "-c", _HOLDER, tmp_path)
    try:
        assert process.stdout.readline() == "None\n"
        with pytest.raises(TrainingError, match=f"process {process.pid} on "):
            list(trainer().fit(batch_of, 1, checkpoints=tmp_path))
        process.kill()
        assert process.wait(60) < 0
        assert len(list(trainer().fit(batch_of, 1, checkpoints=tmp_path))) == 1
    finally:
        process.kill()
        for stream in (process.stdout, process.stderr):
            stream.close()


def test_without_locks_of_the_system_it_warns_and_goes_on(tmp_path, caplog):
    (tmp_path / ".lock").mkdir()  # cannot be opened
    assert len(list(trainer().fit(batch_of, 1, checkpoints=tmp_path))) == 1
    assert f"{tmp_path} is used without a lock" in caplog.text


@pytest.mark.parametrize(("link", "kind"), [(os.symlink, "a link"), (os.link, "another program's")])
def test_a_lock_does_not_empty_another_file(link, kind, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "own").write_bytes(b"own\xff\n")
    link(tmp_path / "own", tmp_path / "run/.lock")
    with pytest.raises(TrainingError, match=rf"got .*/run: its \.lock is {kind}$"):
        list(trainer().fit(batch_of, 1, checkpoints=tmp_path / "run"))
    assert (tmp_path / "own").read_bytes() == b"own\xff\n"


@pytest.mark.parametrize("every", [(), (1,), (4,)])
def test_the_time_of_a_checkpoint_counts_in_no_speed(every, tmp_path, monkeypatch):
    own_save = loop.save

    def slow(*arguments):
        time.sleep(2)
        own_save(*arguments)

    monkeypatch.setattr(loop, "save", slow)
    records = list(trainer().fit(batch_of, 4, every=every, checkpoints=tmp_path, save_every=3))
    assert sum(record.speed.seconds for record in records) < 2


def test_what_is_set_after_a_run_is_what_the_next_starts_from(tmp_path):
    """It does not restore what this trainer saved, nor make steps twice that were not saved."""
    own, options = trainer(0.0), {"every": (1,), "checkpoints": tmp_path, "save_every": 2}
    list(own.fit(batch_of, 2, **options))
    own.model.w.set_value(jnp.full(3, 7.0))
    for record in own.fit(batch_of, 9, **options):
        if record.step == 3:
            break
    own.model.offset.set_value(jnp.float32(5))
    assert list(own.fit(batch_of, 3, **options)) == []
    resumed = trainer(0.0)
    assert [record.step for record in resumed.fit(batch_of, 4, **options)] == [4]
    list(own.fit(batch_of, 4, **options))
    assert values(resumed.model) == values(own.model)
    assert own.model.w[0] == 7 and own.model.offset[...] == 5


def test_a_run_whose_loss_was_not_finite_goes_on_from_its_checkpoint(tmp_path):
    own, options = trainer(), {"checkpoints": tmp_path, "save_every": 1}
    with pytest.raises(TrainingError, match="step 2: the loss or a trained parameter is nan"):
        list(
            own.fit(
                lambda step: jax.tree.map(lambda a: a / np.float32(step < 2 or np.nan), batch_of(step)), 3, **options
            )
        )
    (record,) = own.fit(batch_of, 3, **options)
    assert record.step == 3 and record.metrics["loss"].shape == (2,)
