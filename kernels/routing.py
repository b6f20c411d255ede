"""Routes rows to experts: top-k of each row's scores, and stable sorts by expert.

Few rows are sorted by one program, which compares all with all, others by counting in three launches.
"""

import triton
import triton.language as tl

from .tiles import add, highest


@triton.jit
def ascending_key(scores):
    """An int32 key that orders like the float32 score: -0.0 equals 0.0, and a NaN equals infinity."""
    bits = scores.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, -magnitude, magnitude)
    return tl.where(magnitude > 0x7F800000, 0x7F800000, key)


@triton.jit
def top_k_kernel(
    scores,
    indices,
    num_rows,
    COLUMNS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The columns of each row's TOPK highest scores, highest first; of equal scores, the lower column first.

    Arrays: scores float32 [num_rows, COLUMNS], indices int32 [num_rows, TOPK]; BLOCK_COLUMNS is COLUMNS or more.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLUMNS)
    exists = (rows < num_rows)[:, None] & (columns < COLUMNS)[None, :]
    pointers = scores + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    key = ascending_key(tl.load(pointers, mask=exists, other=0.0))
    # one number that orders by score first and column second: the highest is the choice
    taken = -(2**63)
    order = key.to(tl.int64) * 2**32 + (BLOCK_COLUMNS - 1 - columns)[None, :]
    order = tl.where(exists, order, taken)
    for choice in tl.range(0, TOPK):
        best = tl.reduce(order, 1, highest)
        chosen = BLOCK_COLUMNS - 1 - (best & (BLOCK_COLUMNS - 1)).to(tl.int32)
        tl.store(indices + rows.to(tl.int64) * TOPK + choice, chosen, mask=rows < num_rows)
        order = tl.where(columns[None, :] == chosen[:, None], taken, order)


@triton.jit
def load_experts(experts, row, num_rows, NUM_EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """The experts of rows row, row + 1, ...; NUM_EXPERTS for a row or an expert that does not exist."""
    rows = row + tl.arange(0, BLOCK_ROWS)
    expert = tl.load(experts + rows, mask=rows < num_rows, other=-1)
    return tl.where((expert >= 0) & (expert < NUM_EXPERTS), expert, NUM_EXPERTS)


@triton.jit
def sort_few_kernel(
    experts,
    group_sizes,
    gather_indices,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """The sort of BLOCK_ROWS rows or fewer by one program; rows without an expert come after all others.

    Arrays: experts, gather_indices int32 [num_rows], group_sizes int32 [NUM_EXPERTS].
    """
    expert = load_experts(experts, 0, num_rows, NUM_EXPERTS, BLOCK_ROWS)
    rows = tl.arange(0, BLOCK_ROWS)
    place = tl.full([BLOCK_ROWS], 0, tl.int32)
    for first in tl.range(0, BLOCK_ROWS, STEP):
        other = load_experts(experts, first, num_rows, NUM_EXPERTS, STEP)
        is_earlier = (first + tl.arange(0, STEP))[None, :] < rows[:, None]
        is_before = (other[None, :] < expert[:, None]) | ((other[None, :] == expert[:, None]) & is_earlier)
        place += tl.reduce(is_before.to(tl.int32), 1, add)
    tl.store(gather_indices + place, rows, mask=rows < num_rows)
    sizes = tl.histogram(expert, BLOCK_EXPERTS, mask=expert < NUM_EXPERTS)
    ids = tl.arange(0, BLOCK_EXPERTS)
    tl.store(group_sizes + ids, sizes, mask=ids < NUM_EXPERTS)


@triton.jit
def count_experts_kernel(
    experts,
    counts,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """counts[p, e]: how many of program p's STEPS * BLOCK_ROWS rows belong to expert e.

    Arrays: experts int32 [num_rows], counts int32 [programs, NUM_EXPERTS].
    """
    first = tl.program_id(0) * (STEPS * BLOCK_ROWS)
    total = tl.full([BLOCK_EXPERTS], 0, tl.int32)
    for step in tl.range(0, STEPS):
        expert = load_experts(experts, first + step * BLOCK_ROWS, num_rows, NUM_EXPERTS, BLOCK_ROWS)
        total += tl.histogram(expert, BLOCK_EXPERTS, mask=expert < NUM_EXPERTS)
    ids = tl.arange(0, BLOCK_EXPERTS)
    tl.store(counts + tl.program_id(0) * NUM_EXPERTS + ids, total, mask=ids < NUM_EXPERTS)


@triton.jit
def sum_counts_kernel(
    counts,
    rows_before,
    group_sizes,
    num_programs,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_PROGRAMS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """rows_before[p, e]: how many rows of expert e the programs before p counted; group_sizes[e]: all its rows."""
    ids = tl.program_id(0) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    programs = tl.arange(0, BLOCK_PROGRAMS)
    at = programs[:, None] * NUM_EXPERTS + ids[None, :]
    exists = (programs < num_programs)[:, None] & (ids < NUM_EXPERTS)[None, :]
    count = tl.load(counts + at, mask=exists, other=0)
    tl.store(rows_before + at, tl.associative_scan(count, 0, add) - count, mask=exists)
    tl.store(group_sizes + ids, tl.reduce(count, 0, add), mask=ids < NUM_EXPERTS)


@triton.jit
def place_rows_kernel(
    experts,
    rows_before,
    group_sizes,
    gather_indices,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """gather_indices[position in expert order] = row, for the rows that this program counted.

    Rows without an expert come after all others, in their order.
    """
    first = tl.program_id(0) * (STEPS * BLOCK_ROWS)
    ids = tl.arange(0, BLOCK_EXPERTS)
    sizes = tl.load(group_sizes + ids, mask=ids < NUM_EXPERTS, other=0)
    before = tl.load(rows_before + tl.program_id(0) * NUM_EXPERTS + ids, mask=ids < NUM_EXPERTS, other=0)
    # where each expert's next row goes, and where the next row without an expert goes
    next_own = tl.associative_scan(sizes, 0, add) - sizes + before
    next_stray = tl.reduce(sizes, 0, add) + first - tl.reduce(before, 0, add)
    block = tl.arange(0, BLOCK_ROWS)
    is_earlier = block[None, :] < block[:, None]
    for step in tl.range(0, STEPS):
        row = first + step * BLOCK_ROWS
        expert = load_experts(experts, row, num_rows, NUM_EXPERTS, BLOCK_ROWS)
        is_own = expert < NUM_EXPERTS
        rank = tl.reduce(((expert[None, :] == expert[:, None]) & is_earlier).to(tl.int32), 1, add)
        own_place = tl.gather(next_own, tl.where(is_own, expert, 0), 0)
        place = tl.where(is_own, own_place, next_stray) + rank
        tl.store(gather_indices + place, row + block, mask=row + block < num_rows)
        next_own += tl.histogram(expert, BLOCK_EXPERTS, mask=is_own)
        next_stray += BLOCK_ROWS - tl.reduce(is_own.to(tl.int32), 0, add)
