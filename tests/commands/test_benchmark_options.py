"""benchmarks.training and benchmarks.links: wrong options, and a program whose memory XLA cannot say."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import links, training


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (training, ("--steps", "0"), "--steps"),
        (training, ("--layers", "0"), "--layers"),
        (training, ("--batch", "0"), "--batch"),
        (training, ("--buffer-factor", "nan"), "--buffer-factor"),
        (training, ("--layers", "2", "--data", "1000"), "devices"),
        (training, ("--layers", "1", "--steps", "1", "--tensor", "0"), "--tensor"),
        (links, ("--step", "--expert", "0"), "--expert"),
        (links, ("--step", "--flops", "0"), "--flops"),
        (links, ("--step", "--layers", "1", "--expert", "3"), "--expert"),
        (links, ("--buffer-factor", "2"), "--buffer-factor is of a model's step, so it needs --step"),
    ],
)
def test_wrong_options_are_refused_in_a_line(command, options, message, capsys):
    with pytest.raises(SystemExit) as error:
        command.main(options)
    assert error.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_program_whose_memory_is_not_known_is_measured(monkeypatch, capsys):
    def fails(self):
        raise RuntimeError("INTERNAL: RET_CHECK failure (hlo_schedule.cc:463)")

    compiled = jax.jit(lambda x: x + 1).lower(jnp.float32(1)).compile()
    assert training._planned(compiled) == 8
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", fails)
    assert training._planned(compiled) is None
    assert "not known: INTERNAL: RET_CHECK" in capsys.readouterr().out
