"""Tens of thousands of generated cases on a GPU in minutes: python -m tests.programs.gpu_thorough.

A few configurations are compiled; their values are drawn, computed and checked on the device, by a reference that holds
all rows at once in float64. Three parts: ordinary cases; sizes and indices of any int32, next to guard arrays that
nothing may write; the same case again and again, bit for bit. A failure is printed with what `--only` takes.
"""

import argparse
import collections
import concurrent.futures
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import comparison, generated

OUTPUTS = comparison.OUTPUTS
GUARD = 0x5A5A5A5A
GUARD_SIZE = 1 << 14
Values = collections.namedtuple("Values", "x w topk_weights bias group_sizes gather_indices dy")


class Configuration:
    """A numbered case's compiled functions: draw values, compute, check."""

    def __init__(self, number, implementation):
        self.number = number
        self.case, self.dtype = generated.static_case(number)
        case = self.case
        options = {**case.options, "preferred_element_type": case.out_dtype, "precision": "highest"}
        compute = comparison.passes_of_grouped_gemm(implementation, options, {})

        def run(unwritten, values):
            del unwritten  # donated, it becomes the memory of the results: what nobody writes is NaN
            x, w, topk_weights, bias, group_sizes, gather_indices, dy = values
            y, gradients = compute((x, w, topk_weights, bias), group_sizes, gather_indices, dy)
            return [y, *gradients]

        key = jax.eval_shape(lambda: jax.random.key(0))
        values = jax.eval_shape(functools.partial(draw, case, self.dtype), key, 0.0)
        unwritten = [values.dy, *values[:4]]
        self.draw = jax.jit(functools.partial(draw, case, self.dtype)).lower(key, 0.0).compile()
        # y has the type of dy, and a gradient has the type of its array
        self.fill = jax.jit(lambda: jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), unwritten))
        self.fill = self.fill.lower().compile()
        self.run = jax.jit(run, donate_argnums=0, keep_unused=True).lower(unwritten, values).compile()
        with jax.enable_x64(True):
            self.errors = jax.jit(functools.partial(errors, case)).lower(values, unwritten).compile()

    def wrong(self, values, outputs):
        with jax.enable_x64(True):
            return self.errors(values, outputs)


configuration_of = functools.cache(Configuration)


def draw(case, dtype, key, garbage) -> Values:
    """Values of a case; each size and index is any int32 with the probability `garbage`. What no group reads is NaN."""
    keys = iter(jax.random.split(key, 16))
    rows, experts = case.num_rows, len(case.group_sizes)
    features = case.in_features, case.out_features

    def normal(*shape, fan_in=1):
        return (jax.random.normal(next(keys), shape) / max(fan_in, 1) ** 0.5).astype(dtype)

    x = normal(rows // case.topk if case.permute_x else rows, features[0])
    w = normal(experts, *(features if case.w_layout == "ekn" else features[::-1]), fan_in=features[0])
    dy = normal(rows, features[1], fan_in=features[1]).astype(case.out_dtype or dtype)
    bias = normal(experts, features[1]) if case.biased else None
    topk_weights = None
    if case.weighted:
        shape = (rows,) if case.flat_weights else (rows // case.topk, case.topk)
        topk_weights = jax.random.uniform(next(keys), shape, minval=0.5, maxval=1.5)
        topk_weights = topk_weights.astype(dtype if case.flat_weights else jnp.float32)

    cuts = jnp.sort(jax.random.randint(next(keys), (experts,), 0, rows + 1))
    sizes = jnp.diff(cuts, prepend=jnp.zeros((1,), jnp.int32)).at[-1:].add(rows - cuts[-1:])
    sizes = jnp.where(jax.random.bernoulli(next(keys), 0.15, (experts,)), 0, sizes)
    sizes = _any_int32(next(keys), sizes, rows, garbage)
    indices = None
    if case.gather != "none":
        indices = jax.random.permutation(next(keys), rows).astype(jnp.int32)
        indices = _any_int32(next(keys), indices, rows, garbage)
    values = Values(x, w, topk_weights, bias, sizes.astype(jnp.int32), indices, dy)
    return _poisoned(case, values)


def _any_int32(key, array, rows, probability):
    """The array with some elements replaced: half of these by small numbers, half by any."""
    keys = jax.random.split(key, 4)
    small = jax.random.randint(keys[0], array.shape, -2, rows + 3)
    any_value = jax.lax.bitcast_convert_type(jax.random.bits(keys[1], array.shape, jnp.uint32), jnp.int32)
    replacement = jnp.where(jax.random.bernoulli(keys[2], 0.5, array.shape), small, any_value)
    return jnp.where(jax.random.bernoulli(keys[3], probability, array.shape), replacement, array)


def rows_of(case, sizes, indices):
    """The group of each row in expert order, or E; and its position, or M where the index is out of range."""
    rows = case.num_rows
    # clamped one after the other, since their sum may pass int32
    ends = jax.lax.associative_scan(lambda a, b: a + jnp.minimum(b, rows - a), jnp.clip(sizes, 0, rows))
    row = jnp.arange(rows, dtype=jnp.int32)
    group = jnp.sum(ends[None, :] <= row[:, None], axis=1, dtype=jnp.int32)
    if indices is None:
        return group, row
    return group, jnp.where((indices >= 0) & (indices < rows), indices, rows)


def _poisoned(case, values):
    group, position = rows_of(case, values.group_sizes, values.gather_indices)
    rows, experts = case.num_rows, len(case.group_sizes)
    in_group = group < experts
    position = jnp.where(in_group, position, rows)  # of rows that are read
    row = jnp.where(in_group, jnp.arange(rows, dtype=jnp.int32), rows)

    def keep(array, read):
        if array is None:
            return None
        is_read = jnp.zeros(array.shape[:1], bool).at[read].set(True, mode="drop")
        return jnp.where(is_read.reshape(-1, *[1] * (array.ndim - 1)), array, jnp.array(jnp.nan, array.dtype))

    token = jnp.where(position < rows, position // case.topk, rows)
    weights = values.topk_weights
    if weights is not None:
        weights = keep(weights.reshape(-1), position).reshape(weights.shape)
    return values._replace(
        x=keep(values.x, token if case.permute_x else row),
        w=keep(values.w, group),
        bias=keep(values.bias, group),
        topk_weights=weights,
        dy=keep(values.dy, position if case.permute_y else row),
    )


def reference(case, values):
    """y and the gradients in float64, and which of their elements the contract fixes, both in the order of OUTPUTS."""
    rows, experts, topk = case.num_rows, len(case.group_sizes), case.topk
    group, position = rows_of(case, values.group_sizes, values.gather_indices)
    in_group, in_range = group < experts, position < rows
    token = jnp.where(in_range, position // topk, rows)

    def wide(array):
        return None if array is None else array.astype(jnp.float64)

    def take(array, at, where):
        """Rows of an array; rows that are not read are zero, whatever the array holds."""
        if array.shape[0] == 0:
            return jnp.zeros((rows, *array.shape[1:]), array.dtype)
        read = array.at[at].get(mode="fill", fill_value=0)
        return jnp.where(where.reshape(-1, *[1] * (array.ndim - 1)), read, 0)

    x, w, topk_weights, bias, dy = map(wide, (values.x, values.w, values.topk_weights, values.bias, values.dy))
    w = w if case.w_layout == "ekn" else w.swapaxes(1, 2)
    row = jnp.arange(rows, dtype=jnp.int32)
    x_rows = take(x, token, in_group & in_range) if case.permute_x else take(x, row, in_group)
    dy_rows = take(dy, position, in_group & in_range) if case.permute_y else take(dy, row, in_group)
    matrices = take(w, group, in_group)  # [M, K, N]
    products = jnp.einsum("mk,mkn->mn", x_rows, matrices)
    if bias is not None:
        products = products + take(bias, group, in_group)
    scales = in_group.astype(jnp.float64)
    if topk_weights is not None:
        scales = take(topk_weights.reshape(-1), position, in_group & in_range)
    scaled_dy = dy_rows * scales[:, None]

    y = products * scales[:, None]
    if case.permute_y:
        y = jnp.zeros_like(y).at[jnp.where(in_group, position, rows)].add(y, mode="drop")
    dx = jnp.einsum("mn,mkn->mk", scaled_dy, matrices)
    if case.permute_x:
        dx = jnp.zeros_like(x).at[jnp.where(in_group, token, rows)].add(dx, mode="drop")
    members = (group[None, :] == jnp.arange(experts, dtype=jnp.int32)[:, None]).astype(jnp.float64)
    dw = jnp.einsum("em,mk,mn->ekn", members, x_rows, scaled_dy)
    dw = dw if case.w_layout == "ekn" else dw.swapaxes(1, 2)
    d_weights = None
    if topk_weights is not None:
        sums = jnp.sum(dy_rows * products, axis=1)
        sums = jnp.zeros_like(sums).at[jnp.where(in_group, position, rows)].add(sums, mode="drop")
        d_weights = sums.reshape(topk_weights.shape)
    dbias = None if bias is None else members @ scaled_dy
    return [y, dx, dw, d_weights, dbias], _specified(case, position, members, topk_weights)


def _specified(case, position, members, topk_weights):
    times = jnp.zeros((case.num_rows,), jnp.int32).at[position].add(1, mode="drop")
    row_is_unique = times.at[position].get(mode="fill", fill_value=1) == 1
    named_once_at_most = times <= 1
    y = (times == 1) if case.permute_y else jnp.ones_like(named_once_at_most)
    dx = row_is_unique if case.permute_y else jnp.ones_like(row_is_unique)
    if case.permute_x:
        dx = jnp.all(named_once_at_most.reshape(-1, case.topk), axis=1)
    groups = jnp.ones(members.shape[:1], bool)
    if case.permute_y:
        groups = ~jnp.any((members > 0) & ~row_is_unique[None, :], axis=1)
    weights = None if topk_weights is None else named_once_at_most.reshape(topk_weights.shape)
    return [y[:, None], dx[:, None], groups[:, None, None], weights, groups[:, None]]


def errors(case, values, outputs):
    """Measures how wrong each output is: not finite, not zero where it must be, or off by more than rounding.

    Returns: float64 [5], the largest error relative to the largest element and to the tolerance; above 1 is wrong.
    """
    expected, fixed = reference(case, values)
    results = []
    for got, want, mask in zip(outputs, expected, fixed, strict=True):
        if want is None or want.size == 0:
            results.append(jnp.float64(0))
            continue
        # both roundings there may be, of what is multiplied and of the result, and one of each row that is added
        epsilon = max(jnp.finfo(dtype).eps for dtype in (values.x.dtype, values.dy.dtype))
        got, mask = got.astype(jnp.float64), jnp.broadcast_to(mask, want.shape)
        scale = jnp.max(jnp.where(mask, jnp.abs(want), 0))
        error = jnp.abs(got - want) / jnp.where(scale == 0, 1.0, scale) / (2 * float(epsilon) + 1e-5)
        error = jnp.where(jnp.isfinite(got), error, jnp.inf)
        # rows and groups that nothing is added up in; elsewhere rounded terms may cancel where the exact ones do
        is_empty = jnp.all(want == 0, axis=tuple(range(1, want.ndim)), keepdims=True)
        error = jnp.where(is_empty & (got != 0), jnp.inf, error)
        results.append(jnp.max(jnp.where(mask, error, 0)))
    return jnp.stack(results)


class Tally:
    """Counts cases; keeps what they gave on the device until there are many."""

    def __init__(self, part):
        self.part, self.count, self.failures, self._pending = part, 0, [], []

    def add(self, number, index, wrong):
        self._pending.append((number, index, wrong))
        if len(self._pending) >= 256:
            self.flush()

    def flush(self):
        for number, index, wrong in jax.device_get(self._pending):
            self.count += 1
            if not np.all(wrong <= 1):
                self.failures.append((number, index))
                if len(self.failures) <= 20:
                    named = dict(zip((*OUTPUTS, "guards"), np.round(wrong, 2).tolist(), strict=False))
                    print(f"FAILED --only {self.part}:{number}:{index}  {named}", flush=True)
        self._pending.clear()


def key_of(seed, number, index):
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), index)


def run_cases(configuration, indices, seed, tally):
    for index in indices:
        values = configuration.draw(key_of(seed, configuration.number, index), (0.0, 0.02, 0.2)[index % 3])
        tally.add(
            configuration.number, index, configuration.wrong(values, configuration.run(configuration.fill(), values))
        )


def run_garbage(configuration, indices, seed, tally):
    """Guards lie between all arrays of a call; inputs and guards must stay unchanged."""
    for index in indices:
        values = configuration.draw(key_of(seed + 1, configuration.number, index), (0.5, 1.0)[index % 2])
        guards, copies = zip(
            *(_guarded(array) for array in jax.tree.leaves((configuration.fill(), values))), strict=True
        )
        unwritten, copied = jax.tree.unflatten(jax.tree.structure((configuration.fill(), values)), copies)
        outputs = configuration.run(unwritten, copied)
        touched = _touched(guards, jax.tree.leaves(copied), jax.tree.leaves(values))
        wrong = configuration.wrong(values, outputs)
        with jax.enable_x64(True):
            tally.add(configuration.number, index, jnp.append(wrong, touched.astype(wrong.dtype)))


def _guarded(array):
    return jnp.full((GUARD_SIZE,), GUARD, jnp.int32), array.copy()


@jax.jit
def _touched(guards, after, before):
    """Infinity if a guard or an input changed, else 0."""
    changed = [jnp.any(guard != GUARD) for guard in guards]
    changed += [jnp.any(_bits(a) != _bits(b)) for a, b in zip(after, before, strict=True)]
    return jnp.where(jnp.any(jnp.stack(changed)), jnp.inf, 0.0)


def _bits(array):
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))


@jax.jit
def _differ(outputs, first):
    pairs = zip(jax.tree.leaves(outputs), jax.tree.leaves(first), strict=True)
    return jnp.where(jnp.any(jnp.stack([jnp.any(_bits(a) != _bits(b)) for a, b in pairs])), jnp.inf, 0.0)


def run_repeats(configuration, indices, seed, tally):
    values = configuration.draw(key_of(seed + 2, configuration.number, 0), 0.0)
    first = configuration.run(configuration.fill(), values)
    for index in indices:
        outputs = configuration.run(configuration.fill(), values)
        tally.add(configuration.number, index, _differ(outputs, first)[None])


PARTS = {"cases": run_cases, "garbage": run_garbage, "repeats": run_repeats}


def main(arguments=None):
    """Prints counts and failures; returns the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", default="triton", help="triton, xla, interpret or default")
    for part, count in (("cases", 20_000), ("garbage", 10_000), ("repeats", 1_000)):
        parser.add_argument(f"--{part}", type=int, default=count)
    parser.add_argument("--configurations", type=int, default=40)
    parser.add_argument("--threads", type=int, default=8, help="that compile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="PART:NUMBER:INDEX", help="one case")
    options = parser.parse_args(arguments)
    implementation = None if options.implementation == "default" else options.implementation

    start = time.perf_counter()
    wanted = [options.only.split(":")] if options.only else []
    numbers = [int(number) for _, number, _ in wanted] or range(options.configurations)
    with concurrent.futures.ThreadPoolExecutor(options.threads) as threads:
        configurations = list(threads.map(lambda number: configuration_of(number, implementation), numbers))
    print(f"{len(configurations)} configurations compiled in {time.perf_counter() - start:.0f} s", flush=True)

    failures = 0
    for part, run in PARTS.items():
        start, tally = time.perf_counter(), Tally(part)
        for place, configuration in enumerate(configurations):
            indices = range(place, getattr(options, part), len(configurations))
            if wanted:
                indices = [int(index) for name, _, index in wanted if name == part]
            run(configuration, indices, options.seed, tally)
        tally.flush()
        failures += len(tally.failures)
        seconds = time.perf_counter() - start
        print(f"{part}: {tally.count} run, {len(tally.failures)} failed, {seconds:.0f} s", flush=True)
    return failures


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
