"""The named cases that every implementation is checked on, and their random data."""

import dataclasses
import itertools
import zlib

import jax.numpy as jnp
import numpy as np

MIN_INT, MAX_INT = -(2**31), 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Case:
    """One grouped GEMM.

    Attributes:
      name: the id of its tests.
      group_sizes: as given to the operation, bad values included.
      num_rows: M; by default the sum of group_sizes.
      in_features, out_features: K and N.
      topk, permute_x, permute_y, w_layout: options of grouped_gemm.
      gather: "random" for a permutation, "none", or the bad values that replace its first entries: "out_of_range"
        and "repeated".
      weighted: with topk_weights, float32 [T, k] or, with `flat_weights`, [M] in the dtype of x.
      biased: with bias.
      out_dtype: preferred_element_type.
      index_dtype: of group_sizes and gather_indices.
      poison: "tail" puts NaN into everything that belongs to rows past the last group; "rows" puts NaN and Inf into
        rows of groups 1 and 3; "weights" puts NaN into group 2's matrix and bias.
      default_config: interpret with the configurations that the heuristic chooses, not with small tiles.
    """

    name: str
    group_sizes: tuple[int, ...] = (5, 0, 9, 1, 25)
    num_rows: int | None = None
    in_features: int = 24
    out_features: int = 40
    topk: int = 1
    permute_x: bool = False
    permute_y: bool = False
    w_layout: str = "enk"
    gather: str = "none"
    weighted: bool = False
    flat_weights: bool = False
    biased: bool = False
    out_dtype: str | None = None
    index_dtype: str = "int32"
    poison: str = ""
    default_config: bool = False

    def __post_init__(self):
        if self.num_rows is None:
            object.__setattr__(self, "num_rows", sum(self.group_sizes))

    @property
    def options(self):
        """Keyword arguments of grouped_gemm, and of the oracle's functions."""
        return {"topk": self.topk, "permute_x": self.permute_x, "permute_y": self.permute_y, "w_layout": self.w_layout}


@dataclasses.dataclass(frozen=True)
class Data:
    """Arrays of a case, NumPy; dy is the cotangent of y."""

    x: np.ndarray
    w: np.ndarray
    topk_weights: np.ndarray | None
    bias: np.ndarray | None
    group_sizes: np.ndarray
    gather_indices: np.ndarray | None
    dy: np.ndarray


def make_data(case: Case, dtype, seed: int = 0) -> Data:
    """Random data of a case; the same for the same name, dtype and seed."""
    rng = np.random.default_rng([zlib.crc32(case.name.encode()), seed])
    dtype = jnp.dtype(dtype)
    rows, experts, topk = case.num_rows, len(case.group_sizes), case.topk
    features = case.in_features, case.out_features

    def normal(*shape, scale=1.0):
        return (scale * rng.standard_normal(shape)).astype(dtype)

    x = normal(rows // topk if case.permute_x else rows, features[0])
    w = normal(experts, *(features if case.w_layout == "ekn" else features[::-1]), scale=max(features[0], 1) ** -0.5)
    dy = rng.standard_normal((rows, features[1])) * max(features[1], 1) ** -0.5
    dy = dy.astype(dtype if case.out_dtype is None else case.out_dtype)
    topk_weights = None
    if case.weighted:
        topk_weights = rng.uniform(0.5, 1.5, (rows,) if case.flat_weights else (rows // topk, topk))
        topk_weights = topk_weights.astype(dtype if case.flat_weights else np.float32)
    bias = normal(experts, features[1]) if case.biased else None
    data = Data(
        x=x,
        w=w,
        topk_weights=topk_weights,
        bias=bias,
        group_sizes=np.array(case.group_sizes, case.index_dtype),
        gather_indices=_gather_indices(case, rng),
        dy=dy,
    )
    _poison(case, data)
    return data


def _gather_indices(case, rng):
    if case.gather == "none":
        return None
    indices = rng.permutation(case.num_rows).astype(case.index_dtype)
    if case.gather == "out_of_range":
        limits = np.iinfo(case.index_dtype)
        bad = [-1, case.num_rows, limits.min, limits.max, -case.num_rows, 2 * case.num_rows]
        bad = [index for index in bad if limits.min <= index <= limits.max]
        bad = [index for index in bad if not 0 <= index < case.num_rows]
        indices[: 3 * len(bad) : 3] = bad
    elif case.gather == "repeated":
        # the first and the last row, which are in different groups, and three neighbours
        indices[0] = indices[-1]
        indices[7:10] = indices[7]
    return indices


def _poison(case, data):
    """Puts NaN and Inf where they must reach nothing, or no other group."""
    ends = np.cumsum(np.clip(case.group_sizes, 0, None))
    if case.poison == "tail":
        tail = np.arange(min(ends[-1] if len(ends) else 0, case.num_rows), case.num_rows)
        positions = tail if data.gather_indices is None else data.gather_indices[tail]
        is_tail = np.zeros(case.num_rows, bool)
        is_tail[positions] = True
        if case.permute_x:
            # a token is poisoned only when all of its rows lie past the last group
            data.x[is_tail.reshape(-1, case.topk).all(axis=1)] = np.nan
        else:
            data.x[tail] = np.nan
        data.dy[is_tail if case.permute_y else tail] = np.nan
        if data.topk_weights is not None:
            data.topk_weights.reshape(-1)[is_tail] = np.nan
    elif case.poison == "rows":
        rows = [ends[0], ends[3] - 1]  # group 1's first, group 3's last
        positions = np.array(rows) if data.gather_indices is None else data.gather_indices[rows]
        x_rows = positions // case.topk if case.permute_x else rows
        dy_rows = positions if case.permute_y else rows
        data.x[x_rows[0], 3] = np.nan
        data.x[x_rows[1]] = np.inf
        data.dy[dy_rows[0]] = -np.inf
        data.dy[dy_rows[1], ::2] = np.nan
    elif case.poison == "weights":
        data.w[2] = np.nan
        if data.bias is not None:
            data.bias[2] = np.inf


def _every_option():
    """permute_x, permute_y, topk_weights, bias and w_layout in every combination, with topk 1, 2 and 8 in turn."""
    combinations = itertools.product((False, True), (False, True), (False, True), (False, True), ("enk", "ekn"))
    for number, (permute_x, permute_y, weighted, biased, w_layout) in enumerate(combinations):
        flags = {"px": permute_x, "py": permute_y, "weights": weighted, "bias": biased}
        yield Case(
            name="-".join(["options", *(name for name, on in flags.items() if on), w_layout]),
            group_sizes=(7, 0, 11, 1, 21 if number % 2 else 16),  # or with rows past the last group
            num_rows=40,
            topk=(1, 2, 8)[number % 3],
            permute_x=permute_x,
            permute_y=permute_y,
            w_layout=w_layout,
            gather="random" if permute_x or permute_y or number % 4 == 0 else "none",
            weighted=weighted,
            flat_weights=number % 5 == 0,
            biased=biased,
        )


OPTIONS = tuple(_every_option())
# Two halves, each with every combination of the flags in one of the layouts.
OPTIONS_HALVES = tuple(
    tuple(case for i, case in enumerate(OPTIONS) if (i % 2 == (i // 2).bit_count() % 2) == half)
    for half in (True, False)
)

EVERYTHING = {"topk": 2, "permute_x": True, "permute_y": True, "gather": "random", "weighted": True, "biased": True}

# Most cases have the shapes and options of one of two: "uneven" and "everything". JAX compiles only those, then.
SIZES = (
    Case("uneven"),
    Case("everything", **EVERYTHING),
    Case("uneven-default-config", default_config=True),
    Case("all-rows-in-one-group", group_sizes=(0, 0, 40, 0, 0)),
    Case("groups-of-whole-tiles", group_sizes=(16, 0, 0, 16, 8)),
    Case("rows-past-the-groups", group_sizes=(5, 0, 9, 1, 18), num_rows=40, poison="tail"),
    Case("rows-past-the-groups-everything", (5, 0, 9, 1, 18), 40, poison="tail", **EVERYTHING),
    Case("rows-past-the-groups-default-config", (5, 0, 9, 1, 18), 40, poison="tail", default_config=True),
    Case("no-group-has-rows", group_sizes=(0, 0, 0, 0, 0), num_rows=40, poison="tail"),
    Case("no-group-has-rows-everything", (0, 0, 0, 0, 0), 40, poison="tail", **EVERYTHING),
    Case("single-expert", group_sizes=(21,)),
    Case("single-expert-everything", group_sizes=(22,), **EVERYTHING),
    Case("no-experts", group_sizes=(), num_rows=40, poison="tail"),
    Case("no-experts-everything", (), 40, poison="tail", **EVERYTHING),
    Case("no-rows", group_sizes=(0, 0, 0)),
    Case("no-rows-everything", group_sizes=(0, 0, 0), **EVERYTHING),
    Case("no-in-features", in_features=0, **EVERYTHING),
    Case("no-out-features", out_features=0, **EVERYTHING),
    Case("one-row", group_sizes=(0, 1, 0)),
    Case("fewer-rows-than-a-tile", group_sizes=(2, 0, 3)),
    Case("more-experts-than-rows", group_sizes=(0, 1, 0, 0, 2, 0, 1, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0)),
)

FEATURES = tuple(
    Case(f"features-{k}-to-{n}-{layout}", group_sizes, None, k, n, w_layout=layout, default_config=max(k, n) > 100)
    for k, n, layout, group_sizes in (
        (1, 1, "enk", (3, 0, 4)),
        (17, 96, "enk", (5, 0, 14)),
        (17, 96, "ekn", (5, 0, 14)),
        (96, 17, "enk", (5, 0, 14)),
        (96, 17, "ekn", (5, 0, 14)),
        (727, 96, "enk", (11, 2)),
        (96, 727, "ekn", (11, 2)),
        (17, 1408, "ekn", (11, 2)),
        (1408, 17, "enk", (11, 2)),
        (2880, 96, "ekn", (11, 2)),
        (96, 2880, "enk", (11, 2)),
    )
)

POISONED = (
    Case("nonfinite-rows", group_sizes=(5, 2, 9, 3, 21), poison="rows"),
    Case("nonfinite-rows-everything", group_sizes=(5, 2, 9, 3, 21), poison="rows", **EVERYTHING),
    Case("nonfinite-rows-default-config", (5, 2, 9, 3, 21), poison="rows", default_config=True),
    Case("nonfinite-weights", group_sizes=(5, 2, 9, 3, 21), poison="weights"),
    Case("nonfinite-weights-of-empty-group", group_sizes=(5, 2, 0, 3, 30), poison="weights"),
    Case("nonfinite-weights-everything", (5, 2, 0, 3, 30), poison="weights", **EVERYTHING),
)

BAD_VALUES = (
    Case("sizes-negative", group_sizes=(5, -3, 9, MIN_INT, 26), num_rows=40),
    Case("sizes-negative-with-tail", group_sizes=(-7, 5, -3, 9, -1), num_rows=40, poison="tail"),
    Case("sizes-too-large", group_sizes=(5, 100, 3, 0, 7), num_rows=40),
    Case("sizes-first-too-large", group_sizes=(41, 3, 3, 0, 41), num_rows=40),
    Case("sizes-huge", group_sizes=(MAX_INT, MAX_INT, 3, MIN_INT, 0), num_rows=40),
    Case("sizes-sum-wraps-around", group_sizes=(3, MAX_INT, MAX_INT, 5, MAX_INT), num_rows=40),
    Case("sizes-everything", group_sizes=(3, MIN_INT, 7, MAX_INT, 5), num_rows=40, **EVERYTHING),
    Case("indices-out-of-range-x", permute_x=True, gather="out_of_range", biased=True),
    Case("indices-out-of-range-y", permute_y=True, gather="out_of_range"),
    Case("indices-out-of-range-weights", gather="out_of_range", weighted=True),
    Case("indices-out-of-range-everything", **EVERYTHING | {"gather": "out_of_range"}),
    Case("indices-repeated-x", permute_x=True, gather="repeated", biased=True),
    Case("indices-repeated-y", permute_y=True, gather="repeated", weighted=True, biased=True),
    Case("indices-repeated-everything", **EVERYTHING | {"gather": "repeated"}),
)

DTYPES = (Case("result-in-float32", out_dtype="float32", **EVERYTHING), Case("result-in-float16", out_dtype="float16"))

_INT8 = {"group_sizes": (40, 0, 50), "num_rows": 100, "in_features": 8, "index_dtype": "int8", **EVERYTHING}
INDEX_DTYPES = (
    Case("indices-int8", (100, 0, 27), 300, in_features=8, index_dtype="int8"),
    Case("indices-uint8", (200, 0, 60), 300, in_features=8, index_dtype="uint8"),
    Case("indices-int8-everything", **_INT8),
    Case("indices-int8-out-of-range", **_INT8 | {"gather": "out_of_range"}),
    Case("indices-int16-everything", index_dtype="int16", **EVERYTHING),
    Case("indices-uint32-huge", (9, 2**32 - 1, 4, 0, 0), 40, index_dtype="uint32"),
    Case("indices-uint32-everything", index_dtype="uint32", **EVERYTHING),
)

# What depends on the dtype of x is checked in all of them, the rest in float32.
CASES_IN_EVERY_DTYPE = SIZES + POISONED + DTYPES
CASES_IN_FLOAT32 = BAD_VALUES + INDEX_DTYPES
CASES = CASES_IN_EVERY_DTYPE + FEATURES + CASES_IN_FLOAT32
assert len({case.name for case in CASES + OPTIONS}) == len(CASES + OPTIONS)
