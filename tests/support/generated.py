"""Strategies for hypothesis: cases of grouped_gemm whose statics are numbered, and whose values are any.

A number stands for shapes, dtypes and flags, which JAX compiles for: few numbers with many values each compile little.
The default profile takes few of each, always the same ones; `--hypothesis-profile=thorough` many.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.support import oracle
from tests.support.cases import MAX_INT, MIN_INT, Case, Data, make_data

DTYPES = ("float32", "float16", "bfloat16")
FLOATS = ("x", "w", "topk_weights", "bias")
ARRAYS = (*FLOATS, "group_sizes", "gather_indices", "dy")
_INT32 = st.one_of(st.integers(-2, 70), st.integers(MIN_INT, MAX_INT))


def register_profiles():
    """Names the profiles and loads "quick"; "thorough" takes 10 times as many numbers, and others values each time."""
    # compiling is slow, and every test's fixture stays unchanged from one example to the next
    suppressed = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    common = {"deadline": None, "database": None, "suppress_health_check": suppressed}
    only_once = [Phase.explicit, Phase.generate]  # the first failure is reported without shrinking
    settings.register_profile("quick", derandomize=True, phases=only_once, **common)
    settings.register_profile("thorough", print_blob=True, **common)
    settings.load_profile("quick")


def _is_thorough():
    return not settings().derandomize


def examples(count):
    """The number of examples of a test; the thorough profile takes more."""
    return settings(max_examples=3 * count if _is_thorough() else count)


def on(implementation, count, fits=lambda number: True):
    """(implementation, number) for the first `count` numbers that fit, or in the thorough profile for more.

    The later half of them are left to the sweep; the others are thorough tests where they are interpreted.
    """
    marks = {"interpret": (pytest.mark.interpret,), "triton": (pytest.mark.gpu,)}.get(implementation, ())
    fitting = filter(fits, itertools.count())
    for index, number in enumerate(itertools.islice(fitting, 10 * count if _is_thorough() else count)):
        if index == 0 and implementation == "interpret":
            marks += (pytest.mark.thorough,)
        if index == -(-count // 2):
            marks += (pytest.mark.sweep,)
        yield pytest.param(implementation, number, id=f"{implementation or 'default'}-{number}", marks=marks)


def static_case(number, most_rows=104, most_experts=300) -> tuple[Case, str]:
    """A case without values, and its dtype: shapes with 0 and 1, all flags, every dtype of operands and results."""
    rng = np.random.default_rng(number)

    def flag():
        return bool(rng.integers(2))

    def choose(*values):
        return values[rng.integers(len(values))]

    topk = choose(1, 2, 3, 8)
    tokens = choose(*(tokens for tokens in (1, 3, 5, 13, 24, 48, 104) if tokens * topk <= most_rows))
    experts = choose(*(experts for experts in (1, 2, 3, 5, 5, 17, 64, 300) if experts <= most_experts))
    in_features, out_features = (choose(1, 3, 8, 16, 17, 24, 24, 40, 64) for _ in range(2))
    sizes = [tokens, experts, in_features, out_features]
    if number % 8 == 3:
        sizes[number // 8 % 4] = 0
    tokens, experts, in_features, out_features = sizes
    permute_x, permute_y = flag(), flag()
    dtype = choose(*DTYPES)
    case = Case(
        name=f"generated-{number}",
        group_sizes=(0,) * experts,
        num_rows=tokens * topk,
        in_features=in_features,
        out_features=out_features,
        topk=topk,
        permute_x=permute_x,
        permute_y=permute_y,
        w_layout=choose("enk", "ekn"),
        gather="random" if permute_x or permute_y or flag() else "none",
        weighted=flag(),
        flat_weights=flag(),
        biased=flag(),
        out_dtype=choose(None, None, *DTYPES),
    )
    return case, dtype


def runs_in(implementation, number, **limits):
    """Whether an implementation has kernels for a case; Triton's interpreter gets bfloat16 wrong."""
    case, dtype = static_case(number, **limits)
    is_empty = 0 in (len(case.group_sizes), case.num_rows, case.in_features, case.out_features)
    return implementation != "interpret" or not (is_empty or "bfloat16" in (dtype, case.out_dtype))


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A case with its values; what is printed of one that fails is enough to make it again.

    Attributes:
      case: with its group sizes.
      seed: of `make_data`; the indices are then replaced, and NaN put in.
    """

    case: Case
    dtype: str
    seed: int
    indices: list[int] | None
    poisoned: bool
    data: Data = dataclasses.field(repr=False)


@st.composite
def values(draw, case: Case, dtype, shared: Data | None = None, batched=ARRAYS, garbage=True) -> Drawn:
    """The case with its values: sizes that leave rows over or pass M, indices out of range, and in part any int32.

    What no row of a group reads is NaN in half of the cases.

    Args:
      shared: another result; arrays that are not `batched` are taken from it.
      garbage: sizes and indices of any int32; else sizes of at most M in all and indices that differ.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_rows, experts = case.num_rows, len(case.group_sizes)
    total = rng.choice([num_rows, rng.integers(num_rows + 1)])
    sizes = rng.multinomial(total, rng.dirichlet(np.full(experts, 0.5))) if experts else np.zeros(0, int)
    sizes = sizes.astype(np.int32)
    case = dataclasses.replace(case, group_sizes=tuple((_replaced(draw, sizes) if garbage else sizes).tolist()))
    seed = int(rng.integers(2**31))
    data = make_data(case, dtype, seed)
    if data.gather_indices is not None and garbage:
        _replaced(draw, data.gather_indices)
    if shared is not None:
        data = dataclasses.replace(data, **{name: getattr(shared, name) for name in ARRAYS if name not in batched})
        case = dataclasses.replace(case, group_sizes=tuple(data.group_sizes.tolist()))
    poisoned = draw(st.booleans())
    if poisoned:
        poison_unread(case, data, batched)
    indices = None if data.gather_indices is None else data.gather_indices.tolist()
    return Drawn(case, dtype, seed, indices, poisoned, data)


def _replaced(draw, array):
    """The array with up to three elements replaced."""
    if len(array):
        for at, value in draw(st.lists(st.tuples(st.integers(0, len(array) - 1), _INT32), max_size=3)):
            array[at] = value
    return array


def poison_unread(case: Case, data: Data, names=ARRAYS):
    """Puts NaN into those elements of the arrays of these names that no row of a group reads."""
    ranges = oracle.group_ranges(data.group_sizes, case.num_rows)
    rows = np.array([row for rows in ranges for row in rows], int)
    positions = rows if data.gather_indices is None else data.gather_indices[rows]
    positions = positions[(positions >= 0) & (positions < case.num_rows)]
    groups = [group for group, rows in enumerate(ranges) if len(rows)]
    read = {
        "x": positions // case.topk if case.permute_x else rows,
        "w": groups,
        "topk_weights": positions,
        "bias": groups,
        "dy": positions if case.permute_y else rows,
    }
    for name in read.keys() & set(names):
        array = getattr(data, name)
        if array is not None:
            array = array.reshape(-1) if name == "topk_weights" else array
            array[np.setdiff1d(np.arange(len(array)), read[name])] = np.nan


def batched_names(number, case: Case):
    """Which arrays of a case have a batch axis, a subset of those that it has; at least one."""
    rng = np.random.default_rng([1, number])
    present = {"topk_weights": case.weighted, "bias": case.biased, "gather_indices": case.gather != "none"}
    names = [name for name in ARRAYS if present.get(name, True)]
    chosen = [name for name in names if rng.integers(2)]
    return tuple(chosen or [names[rng.integers(len(names))]])


def is_merged(number, **limits):
    """Whether a batch is of rows, and so may be computed by one launch of each kernel rather than by a loop."""
    case, _ = static_case(number, **limits)
    return number % 3 > 0 and case.num_rows > 0 and {"x", "dy"} <= set(batched_names(number, case))


@st.composite
def batches(draw, number, **limits) -> list[Drawn]:
    """The elements of a batch, which share what is not batched."""
    case, dtype = static_case(number, **limits)
    names = batched_names(number, case)
    first = draw(values(case, dtype, batched=names))
    return [first, *(draw(values(case, dtype, first.data, names)) for _ in range(number % 3))]


def stacked(name, elements):
    """The arrays `name` of all elements, stacked to [B, ...]; None where the elements have none."""
    arrays = [getattr(element.data, name) for element in elements]
    return None if arrays[0] is None else jnp.asarray(np.stack(arrays))
