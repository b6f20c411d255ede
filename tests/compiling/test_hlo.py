"""What `tools.hlo` and `tools.collectives` read of compiled programs, and the options of `tools.compiled_step`."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.models import RUNS, options_of
from jgg.core.program_memory import Memory, planned_memory
from tools import collectives, compiled_step
from tools.collectives import Collective
from tools.hlo import loops_of

# As XLA writes for a GPU: a fusion that hands a Triton kernel a slice, an asynchronous slice, a slice into a stack, and
# a fill. The kernel's code is `.entry my_kernel(`, compressed.
GPU_PROGRAM = (Path(__file__).parents[1] / "data" / "gpu_program.txt").read_text()
# The same for two GPUs: a gather that overlaps a product, and an exchange that overlaps nothing.
COLLECTIVES = """
%async_computation (p: bf16[2,8]) -> bf16[2,8] {
  %p = bf16[2,8]{1,0} parameter(0)
  ROOT %all-to-all.1 = bf16[2,8]{1,0} all-to-all(%p), replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (x: bf16[2,8], w: bf16[4,8]) -> bf16[2,8] {
  %x = bf16[2,8]{1,0} parameter(0)
  %w = bf16[4,8]{1,0} parameter(1)
  %gather = ((bf16[4,8]{1,0}), bf16[8,8]{1,0}) all-gather-start(%w), replica_groups={{0,1}}, dimensions={0}
  %product.1 = (bf16[2,8]{1,0}, s8[64]{0}) custom-call(%x), custom_call_target="__cublas$lt$matmul"
  %gathered = bf16[8,8]{1,0} all-gather-done(%gather)
  %first = bf16[2,8]{1,0} get-tuple-element(%product.1), index=0
  %product.2 = (bf16[2,8]{1,0}, s8[64]{0}) custom-call(%first, %gathered), custom_call_target="__cublas$lt$matmul"
  %second = bf16[2,8]{1,0} get-tuple-element(%product.2), index=0
  %exchange = ((bf16[2,8]{1,0}), bf16[2,8]{1,0}) async-start(%second), calls=%async_computation
  ROOT %exchanged = bf16[2,8]{1,0} async-done(%exchange)
}
"""


def test_collectives_and_what_runs_beside_them():
    (outside,) = loops_of(COLLECTIVES)
    assert collectives.collectives_of(outside) == [
        Collective("all-gather", 8 * 8 * 2 / 2, ("__cublas$lt$matmul",)),
        Collective("all-to-all", 2 * 8 * 2 / 2, ()),
    ]
    assert "all-gather: 0.0 MB, overlaps 1 x __cublas$lt$matmul" in collectives.report(COLLECTIVES)


@pytest.mark.parametrize("donated, results", [((), 4000), ((0,), 0)])
def test_memory_of_results_over_arguments_counts_once(donated, results):
    program = jax.jit(lambda x: x + 1, donate_argnums=donated).lower(jnp.zeros(1000)).compile()
    assert planned_memory(program) == Memory(arguments=4000, results=results, temporaries=0)


def test_kernels_of_a_program_for_a_gpu():
    outside, loop = loops_of(GPU_PROGRAM)
    (fill,) = outside.kernels
    assert (outside.passes, fill.kind, fill.nbytes) == (1, "fill", 3 * 4 * 8 * 4)
    assert (loop.name, loop.passes) == ("while.7 (jit(step)/while)", 3)
    assert [(kernel.kind, kernel.nbytes) for kernel in loop.kernels] == [
        ("slice", 4 * 8 * 2),
        ("call", 4 * 8 * 4),
        ("slice into a stack", 4 * 8 * 4),
    ]
    assert [kernel.op_name for kernel in loop.kernels] == ["jit(step)/slice", "", ""]
    assert loop.kernels[1].name == "my_kernel"


def test_loops_in_loops_of_a_compiled_program():
    """The text that this XLA writes is understood."""

    def outer(x, _):
        return jax.lax.fori_loop(0, 5, lambda _, x: jnp.sin(x @ x), x), None

    text = jax.jit(lambda x: jax.lax.scan(outer, x, None, 7)[0]).lower(jnp.ones((17, 17))).compile().as_text()
    assert [loop.passes for loop in loops_of(text)] == [1, 7, 35]
    assert loops_of(text)[2].kernels


@pytest.mark.parametrize("run", RUNS)
def test_the_tool_that_compiles_steps_names_options_that_do_not_fit(run, monkeypatch, capsys):
    monkeypatch.setattr(compiled_step, "topology", lambda folder, count: jax.devices() * count)
    with pytest.raises(SystemExit):
        compiled_step.main(["--run", run, "--layers", "2", "--expert", "3"])
    assert "error: --expert and --fsdp must split 128 experts, got 3 and 1" in capsys.readouterr().err


@pytest.mark.parametrize("run", RUNS)
def test_the_tool_that_compiles_steps_has_the_options_of_models(run):
    args = compiled_step.make_parser().parse_args(["--run", run, "--batch-invariant"])
    assert options_of(args, args.run)["batch_invariant"]
