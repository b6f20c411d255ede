"""Norms of rows and the rotary embedding of heads, with their gradients, against float64 in every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.core.gpu_target import current_target
from jgg.launching.choice import How
from jgg.launching.tiles import TILES
from jgg.models.operations.norm import NORM, NORM_BACKWARD, Norm, NormBackward, rms_norm
from jgg.models.operations.rotary import ROTARY, ROTARY_BACKWARD, Rotary, RotaryBackward, rotate
from jgg.products.add_gated import ADD_GATED, AddGated
from tests.support.closeness import assert_close, distance
from tests.support.marks import INTERPRET, KERNELS, TRITON, on

EPSILON = 1e-3
EVERY_DTYPE = pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("xla", "float32"),
        pytest.param("interpret", "float32", marks=pytest.mark.interpret),
        pytest.param("interpret", "float16", marks=[pytest.mark.interpret, pytest.mark.sweep]),
        *(pytest.param("triton", dtype, marks=pytest.mark.gpu) for dtype in ("float32", "float16", "bfloat16")),
    ],
)
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def how(implementation):
    return How(implementation, current_target())


def random(seed, *shapes, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def wide(*arrays):
    return [None if array is None else np.asarray(array).astype(np.float64) for array in arrays]


def norm64(x, scale):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON) * scale


def norm_gradients64(x, scale, dy):
    """The gradients of x and of scale, which is summed over all axes but the last."""
    root = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON)
    normalized, gradient = x * root, dy * scale
    dx = root * (gradient - normalized * np.mean(gradient * normalized, axis=-1, keepdims=True))
    return dx, np.sum(dy * normalized, axis=tuple(range(x.ndim - 1)))


@EVERY_DTYPE
@pytest.mark.parametrize("has_added", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 96), (33, 17), (5, 2880), (3, 7168), (2, 9000), (2, 20000), (0, 16)])
def test_norm(rows, columns, has_added, implementation, dtype, monkeypatch):
    monkeypatch.setitem(TILES["norm_backward_kernel"], "programs", 8)  # which have several rows each
    x, added, dy, d_total = random(columns, *[(rows, columns)] * 4, dtype=dtype)
    (scale,) = random(1, (columns,), dtype=dtype)
    added, d_total = (added, d_total) if has_added else (None, None)
    factor = {"added_scale": 0.5} if has_added else {}
    total, y = NORM(how(implementation), Norm(x, added, scale), epsilon=EPSILON, **factor)
    assert (total is None) == (not has_added)
    x64, added64, scale64, dy64, d_total64 = wide(x, added, scale, dy, d_total)
    if has_added:
        x64 = x64 + 0.5 * added64
        assert_close(total, x64, TOLERANCE[dtype])
        x, x64 = total, wide(total)[0]
    assert y.dtype == x.dtype
    assert_close(y, norm64(x64, scale64), TOLERANCE[dtype])
    gradients = NORM_BACKWARD(how(implementation), NormBackward(x, scale, dy, d_total), epsilon=EPSILON)
    dx64, d_scale64 = norm_gradients64(x64, scale64, dy64)
    assert_close(gradients.dx, dx64 + (0 if d_total64 is None else d_total64), TOLERANCE[dtype])
    assert_close(gradients.d_scale, d_scale64, 1e-5)


HEADS = {  # heads, kv heads, D, pairs
    "64": (3, 1, 64, 32),
    "80": (4, 2, 80, 40),
    "128 and a quarter of it rotated": (5, 3, 128, 16),
    "256": (2, 2, 256, 128),
    "256 and a quarter of it rotated": (4, 1, 256, 32),
    "odd": (17, 1, 17, 3),
}


def rotary64(x, scale, cos, sin, features):
    heads = x.reshape(-1, len(cos), x.shape[1] // features, features)
    heads = heads if scale is None else norm64(heads, scale)
    return np.asarray(rotate(heads, cos[None, :, None], sin[None, :, None])).reshape(x.shape)


def rotary_gradients64(x, scale, cos, sin, dy, features):
    back = rotary64(dy, None, cos, -sin, features)  # the inverse rotation of a cosine and a sine of any size
    if scale is None:
        return back, None
    dx, d_scale = norm_gradients64(x.reshape(-1, features), scale, back.reshape(-1, features))
    return dx.reshape(x.shape), d_scale


@EVERY_DTYPE
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("name", "batch"), [*((name, 2) for name in HEADS), ("64", 0)])
def test_rotary(name, batch, has_norm, implementation, dtype):
    heads, kv_heads, features, pairs = HEADS[name]
    positions, parameters = 7, {"head_features": features, "epsilon": EPSILON}
    widths = [(batch * positions, count * features) for count in (heads, kv_heads)]
    q, k, dq, dk = random(features, *widths, *widths, dtype=dtype)
    scales = random(1, (features,), (features,), dtype=dtype) if has_norm else (None, None)
    cos, sin = random(2, (positions, pairs), (positions, pairs))
    results = ROTARY(how(implementation), Rotary(q, k, *scales, cos, sin), **parameters)
    kept = (q, k) if has_norm else (None, None)
    gradients = ROTARY_BACKWARD(how(implementation), RotaryBackward(*kept, *scales, cos, sin, dq, dk), **parameters)
    got = zip(results, gradients[:2], gradients[2:], strict=True)
    for (y, dx, d_scale), x, scale, dy in zip(got, (q, k), scales, (dq, dk), strict=True):
        arrays = wide(x, scale, cos, sin)
        with jax.enable_x64(True):
            want = rotary64(*arrays, features)
            want_dx, want_d_scale = rotary_gradients64(*arrays, *wide(dy), features)
        assert y.dtype == dx.dtype == x.dtype
        assert_close(y, want, TOLERANCE[dtype])
        assert_close(dx, want_dx, TOLERANCE[dtype])
        assert (d_scale is None) == (not has_norm)
        assert_close(d_scale, want_d_scale, 1e-5)


@KERNELS
def test_a_row_has_the_same_bits_alone_and_among_others(implementation):
    x, added, dy = random(3, *[(37, 96)] * 3)
    (scale,) = random(1, (96,))
    cos, sin = random(2, (37, 16), (37, 16))

    def results(first, last):
        rows = slice(first, last)
        totals = NORM(how(implementation), Norm(x[rows], added[rows], scale), epsilon=EPSILON)
        back = NORM_BACKWARD(how(implementation), NormBackward(x[rows], scale, dy[rows], added[rows]), epsilon=EPSILON)
        angles, head = (cos[rows], sin[rows]), (scale[:32], scale[32:64])
        operands = Rotary(x[rows], added[rows], *head, *angles)
        rotated = ROTARY(how(implementation), operands, head_features=32, epsilon=EPSILON)
        operands = RotaryBackward(x[rows], added[rows], *head, *angles, dy[rows], x[rows])
        rotated_back = ROTARY_BACKWARD(how(implementation), operands, head_features=32, epsilon=EPSILON)
        return [*totals, back.dx, *rotated, *rotated_back[:2]]

    alone = [results(row, row + 1) for row in (0, 20, 36)]
    for number, among in enumerate(results(0, 37)):
        for row, own in zip((0, 20, 36), alone, strict=True):
            np.testing.assert_array_equal(among[row : row + 1], own[number])


@on("xla", INTERPRET, TRITON)
@pytest.mark.parametrize("shared", ["scale", "scale and added", "nothing"])
def test_norm_under_vmap(shared, implementation):
    x, added = random(4, (3, 5, 32), (3, 5, 32))
    (scale,) = random(5, (3, 32))
    axes = Norm(0, None if "added" in shared else 0, None if "scale" in shared else 0)
    operands = Norm(x, added if axes.added == 0 else added[0], scale if axes.scale == 0 else scale[0])
    norm = functools.partial(NORM, how(implementation), epsilon=EPSILON)
    got = jax.jit(jax.vmap(norm, in_axes=(axes,)))(operands)
    for each in range(3):
        own = [array[each] if axis == 0 else array for array, axis in zip(operands, axes, strict=True)]
        assert_close([got.total[each], got.y[each]], [own[0] + own[1], rms_norm(own[0] + own[1], own[2], EPSILON)])


@on("xla", INTERPRET, TRITON)
@pytest.mark.parametrize("batched", ["q", "qk", "qkcs", "qkcs one position each"])
def test_rotary_under_vmap(batched, implementation):
    tokens, positions = 6, 6 if "each" in batched else 3
    q, k, cos, sin = random(6, (2, tokens, 48), (2, tokens, 16), (2, positions, 8), (2, positions, 8))
    names = dict(q="q", k="k", cos="c", sin="s")
    axes = {name: 0 if letter in batched.split()[0] else None for name, letter in names.items()}
    arrays = {name: array if axes[name] == 0 else array[0] for name, array in dict(q=q, k=k, cos=cos, sin=sin).items()}
    rotary = functools.partial(ROTARY, how(implementation), head_features=16, epsilon=EPSILON)
    scales = {"q_scale": None, "k_scale": None}
    got = jax.jit(jax.vmap(rotary, in_axes=(Rotary(**axes, **scales),)))(Rotary(**arrays, **scales))
    for each in range(2):
        own = Rotary(**{n: a[each] if axes[n] == 0 else a for n, a in arrays.items()}, **scales)
        assert_close([got.q[each], got.k[each]], list(ROTARY(how("xla"), own, head_features=16, epsilon=EPSILON)))


@KERNELS
def test_results_are_rounded_once(implementation):
    """So the error is only their dtype's, and less than where each operation rounds."""
    q, k = random(7, (64, 256), (64, 64), dtype="float16")
    cos, sin = random(8, (64, 32), (64, 32))
    got = ROTARY(how(implementation), Rotary(q, k, None, None, cos, sin), head_features=64, epsilon=EPSILON)
    want = rotary64(*wide(q, None, cos, sin), 64)
    half = [part.astype(jnp.float16)[:, None] for part in (cos, sin)]
    by_operation = rotate(q.reshape(64, 4, 64), *half).reshape(q.shape)
    assert distance(got.q, want) < 0.7 * distance(by_operation, want)


@EVERY_DTYPE
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 17), (5, 2880), (0, 16)])
def test_add_gated(rows, columns, has_gate, implementation, dtype):
    y, added = random(columns, *[(rows, columns)] * 2, dtype=dtype)
    (gate,) = random(1, (rows, 1)) if has_gate else (None,)
    got = ADD_GATED(how(implementation), AddGated(y, added, gate))
    y64, added64, gate64 = wide(y, added, gate)
    want = y64 + added64 * (1 / (1 + np.exp(-gate64)) if has_gate else 1)
    assert got.dtype == y.dtype
    assert_close(got, want, TOLERANCE[dtype])


@KERNELS
def test_add_gated_under_vmap(implementation):
    y, added = random(2, (3, 5, 40), (5, 40))
    (gate,) = random(1, (3, 5, 1))
    add = functools.partial(ADD_GATED, how(implementation))
    got = jax.vmap(lambda y, added, gate: add(AddGated(y, added, gate)), (0, None, 0))(y, added, gate)
    assert_close(got, y + added[None] / (1 + jnp.exp(-gate)), 1e-6)
    ungated = jax.vmap(lambda y, added: add(AddGated(y, added)), (0, None))(y, added)
    assert_close(ungated, y + added[None], 1e-6)
