"""Kernels that write over arrays, in a scan: XLA may not take such an array, nor any other of theirs, for a slice.

It hands a kernel slices of the stacks that a scan reads and writes, and then forgets that the kernel writes over what
it reads. It leaves alone what is behind a barrier.
"""

import re

import jax
import jax.numpy as jnp
import pytest

import jgg
from jgg.core.gpu_target import current_target
from jgg.launching.choice import How, Launcher
from jgg.models.operations.attend_one import ATTEND_ONE, AttendOne
from jgg.products.combine import Combine, Place, combine

LAYERS, TOKENS, HEADS, FEATURES = 2, 3, 2, 32
BARRIER = "stablehlo.optimization_barrier"


def attend(own):
    """All of its arrays are slices, the caches too."""
    layer, positions = jnp.int32(0), jnp.zeros(TOKENS, jnp.int32)
    operands = AttendOne(own["q"], own["k"], own["v"], own["k_cache"], own["v_cache"], layer, positions)
    return ATTEND_ONE(How("triton", current_target()), operands, scale=1.0, window=None)


def add_up(own):
    """One half of the columns of y."""
    launcher = Launcher.of(How("triton", current_target()))
    place = Place(own["y"], FEATURES // 2, FEATURES)
    return combine(launcher, Combine(own["rows"], own["positions"]), 1, place, range(FEATURES // 2))


def shapes_of(**shapes):
    return {name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32) for name, shape in shapes.items()}


CACHE = 1, TOKENS, 7, HEADS, FEATURES
CASES = {
    "attend": (attend, shapes_of(**dict.fromkeys("qkv", (TOKENS, HEADS, FEATURES)), k_cache=CACHE, v_cache=CACHE), 2),
    "add up": (
        add_up,
        shapes_of(rows=(TOKENS, FEATURES), y=(TOKENS, FEATURES))
        | {"positions": jax.ShapeDtypeStruct((LAYERS, TOKENS), jnp.int32)},
        1,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_all_arrays_are_behind_barriers(case):
    function, stacks, written = CASES[case]
    with jgg.target(90):
        scanned = jax.jit(lambda stacks: jax.lax.scan(lambda _, own: (None, function(own)), None, stacks)[1])
        text = scanned.trace(stacks).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = re.findall(r"(%\d+)(?::(\d+))? = stablehlo.custom_call @triton_kernel_call_ffi\((.*?)\)(.*)", text)
    name, count, operands, options = call
    assert options.count("#stablehlo.output_operand_alias<") == written
    barriers = dict(re.findall(rf"(%\S+) = {BARRIER} (%\S+) :", text))
    assert set(operands.split(", ")) <= barriers.keys(), text
    lines = [line.partition(" {")[0] for line in text.splitlines()]  # not the bytes of kernels: any text
    results = [f"{name}#{number}" for number in range(int(count))] if count else [name]
    for result in results:
        uses = [line for line in lines if re.search(rf"{result}\b", line.partition(" = ")[2])]
        assert len(uses) == 1 and BARRIER in uses[0], uses
