"""Measures how far results are from what they must be."""

import jax
import numpy as np


def float64(array):
    return np.asarray(array).astype(np.float64)


def distance(got, want):
    """The norm of the error, relative to the norm of `want`."""
    return np.linalg.norm(float64(got) - float64(want)) / np.linalg.norm(float64(want))


def largest_error(got, want):
    """The largest error of an element, relative to the largest element of `want`."""
    got, want = float64(got), float64(want)
    return np.max(np.abs(got - want), initial=0) / (np.max(np.abs(want), initial=0) or 1)


def assert_close(got, want, tolerance=1e-5, name="", least_scale=0):
    """Checks a tree of arrays: elements may be wrong by `tolerance`, relative to themselves and to the largest.

    `least_scale` replaces the largest element of an array that has smaller ones only.
    """

    def check(path, got, want):
        got, want = float64(got), float64(want)
        what = f"{name}{jax.tree_util.keystr(path)}"
        assert got.shape == want.shape, what
        scale = np.max(np.abs(want), initial=least_scale)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * scale, err_msg=what)

    jax.tree.map_with_path(check, got, want)
