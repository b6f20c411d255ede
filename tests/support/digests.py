"""Digests of many arrays, small enough to commit; NumPy alone, as programs with other environments import it."""

import numpy as np

STRIDE = 9


def digest(arrays):
    """Float32: of each array in the order of their names, its norm and every ninth of its elements."""
    parts = []
    for name in sorted(arrays):
        flat = np.asarray(arrays[name], np.float32).reshape(-1)
        parts += [[np.linalg.norm(flat)], flat[::STRIDE]]
    return np.concatenate(parts).astype(np.float32)


def assert_close(arrays, expected):
    """Arrays are those of a digest to 1e-4 of their norms: errors grow with these, and processors round differently."""
    parts, end = {}, 0
    for name in sorted(arrays):
        begin, end = end, end + 1 + -(-np.size(arrays[name]) // STRIDE)
        parts[name] = expected[begin:end]
    assert end == len(expected)
    for name, own in parts.items():
        np.testing.assert_allclose(digest({name: arrays[name]}), own, rtol=0, atol=1e-4 * own[0], err_msg=name)
