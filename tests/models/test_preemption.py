"""SIGTERM while `jgg.train.Trainer.fit` runs: what it saves and raises, and whose handler is in place."""

import signal
import threading

import jax
import pytest

from jgg.train import Preempted
from tests.models.test_train import batch_of, trainer, values
from tests.support import processes

pytestmark = pytest.mark.usefixtures("optax_promotion")


@pytest.fixture(autouse=True)
def received():
    """The signals that reach the program's own handler, without which a failure here would end the tests."""
    received = []

    def own(number, frame):
        received.append(number)

    before = signal.signal(signal.SIGTERM, own)
    yield received
    assert signal.getsignal(signal.SIGTERM) is own
    signal.signal(signal.SIGTERM, before)


def terminated_at(stop):
    """`batch_of`, which gets SIGTERM as a step's batch is made."""

    def batches(step):
        if step == stop:
            signal.raise_signal(signal.SIGTERM)
        return batch_of(step)

    return batches


@pytest.mark.parametrize("stop", [4, 5, 8])  # at a checkpoint; after it; at a checkpoint and a record
def test_a_run_stops_after_the_step_and_goes_on_to_the_same_bits(stop, tmp_path, received):
    options = {"every": (4,), "checkpoints": tmp_path / "run", "save_every": 4}
    whole, first, second, records = trainer(), trainer(), trainer(), []
    wanted = [record.metrics["loss"].tolist() for record in whole.fit(batch_of, 12, every=(1,))]
    with pytest.raises(Preempted, match=f"^stopped by SIGTERM after step {stop}$") as raised:
        records.extend(first.fit(terminated_at(stop), 12, **options))
    assert raised.value.step == stop and records[-1].step == stop and not received
    assert (tmp_path / "run" / str(stop)).is_dir()
    records.extend(second.fit(batch_of, 12, **options))
    assert [[loss] for record in records for loss in record.metrics["loss"].tolist()] == wanted
    assert values(second.model) == values(whole.model)


def test_a_run_is_stopped_before_its_first_step_and_not_after_its_last(tmp_path, received):
    with pytest.raises(Preempted, match="after step 0"):
        list(trainer().fit(terminated_at(1), 3, checkpoints=tmp_path))
    assert not received
    assert [record.step for record in trainer().fit(terminated_at(3), 3, checkpoints=tmp_path)] == [3]
    assert received == [signal.SIGTERM]  # nothing else tells the program


def test_a_signal_while_the_caller_has_a_record_counts(tmp_path):
    steps = []
    with pytest.raises(Preempted, match="after step 3"):
        for record in trainer().fit(batch_of, 9, every=(2,), checkpoints=tmp_path):
            steps.append(record.step)
            signal.raise_signal(signal.SIGTERM)
    assert steps == [2, 3]


def test_without_a_checkpoint_to_go_on_from_the_signal_is_the_program_s(received):
    assert [record.step for record in trainer().fit(terminated_at(2), 3)] == [3]
    assert received == [signal.SIGTERM]


def test_in_another_thread_the_signal_is_the_program_s(tmp_path, received):
    told, is_begun = [], threading.Event()

    def batches(step):
        is_begun.set()
        return batch_of(step)

    def run():
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            told.extend(trainer().fit(batches, 3, checkpoints=tmp_path))

    thread = threading.Thread(target=run)
    thread.start()
    assert is_begun.wait(300)
    signal.raise_signal(signal.SIGTERM)
    thread.join()
    assert [record.step for record in told] == [3] and received == [signal.SIGTERM]


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    own = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert [record.step for record in trainer().fit(terminated_at(2), 3, checkpoints=tmp_path)] == [3]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, own)


def test_the_handler_is_put_back_where_records_are_asked_for_no_longer(tmp_path, received):
    own = signal.getsignal(signal.SIGTERM)
    fit = trainer().fit(batch_of, 3, every=(1,), checkpoints=tmp_path)
    assert signal.getsignal(signal.SIGTERM) is own  # nothing was asked for
    next(fit)
    assert signal.getsignal(signal.SIGTERM) is not own
    fit.close()
    assert signal.getsignal(signal.SIGTERM) is own
    with pytest.raises(ZeroDivisionError):
        list(trainer().fit(lambda step: 1 / 0, 3, checkpoints=tmp_path))
    assert signal.getsignal(signal.SIGTERM) is own and not received


def test_a_signal_goes_to_the_handler_before_where_the_run_is_given_up(tmp_path, received):
    for record in trainer().fit(terminated_at(2), 9, every=(1,), checkpoints=tmp_path / "left"):
        if record.step == 2:
            break
    assert received == [signal.SIGTERM]

    def failing(step):
        terminated_at(2)(step)
        return batch_of(step) if step < 2 else 1 / 0

    with pytest.raises(ZeroDivisionError):
        list(trainer().fit(failing, 9, checkpoints=tmp_path / "wrong"))
    assert received == [signal.SIGTERM] * 2


_PROGRAM = """
import sys
from tests.models.test_preemption import terminated_at
from tests.models.test_train import trainer

steps, left_at = map(int, sys.argv[2:])
for record in trainer().fit(terminated_at(3), steps, every=(1,), checkpoints=sys.argv[1]):
    if record.step == left_at:
        break
print("goes on")
"""


@pytest.mark.parametrize(("steps", "left_at", "code"), [(4, 3, -signal.SIGTERM), (3, 4, 0)])
def test_a_program_without_a_handler_goes_on_after_the_last_step_alone(steps, left_at, code, tmp_path):
    process = processes.start("-c", _PROGRAM, tmp_path / "run", steps, left_at)
    out, errors = process.communicate(timeout=300)
    assert (process.returncode, out) == (code, "" if code else "goes on\n"), errors
    assert (tmp_path / "run" / "3").is_dir()


def test_where_the_handler_cannot_be_put_back_signals_go_to_the_one_before(tmp_path, received):
    """Records are dropped in another thread, and before those of a run that began later."""
    own = signal.getsignal(signal.SIGTERM)
    dropped = trainer().fit(batch_of, 3, every=(1,), checkpoints=tmp_path / "dropped")
    next(dropped)
    thread = threading.Thread(target=dropped.close)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is not own
    signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is own
    first, second = (trainer().fit(batch_of, 3, every=(1,), checkpoints=tmp_path / name) for name in "ab")
    next(first), next(second)
    first.close(), second.close()
    signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM] * 2 and signal.getsignal(signal.SIGTERM) is own
