"""The least time of products, by numbers that were computed by hand."""

import dataclasses

import jax.numpy as jnp
import pytest

from jgg.tuning import workloads
from jgg.tuning.roofline import least_seconds, percent_of_roofline

SIZES = {"num_rows": 24, "in_features": 8, "out_features": 6, "num_experts": 4, "topk": 2}


def test_the_least_time_is_of_the_bytes_or_of_the_dense_product():
    assert least_seconds(6e9, 2e12, 1e-3) == pytest.approx(3e-3)
    assert least_seconds(6e9, 2e12, 4e-3) == 4e-3
    assert least_seconds(6e9, 2e12) == pytest.approx(3e-3)  # it multiplies nothing
    assert least_seconds(6e9, None, 4e-3) is None
    assert least_seconds(6e9, 2e12, None) is None


def test_the_least_time_is_given_in_percent_of_a_measured_one():
    assert percent_of_roofline(3e-3, 4e-3) == pytest.approx(75)
    assert percent_of_roofline(None, 4e-3) is None
    assert percent_of_roofline(3e-3, None) is None


@pytest.mark.parametrize(
    ("op", "experts", "options", "num_bytes"),
    [
        ("forward", None, {}, 2 * (24 * 8 + 4 * 8 * 6 + 24 * 6)),
        ("forward", 3, {}, 2 * (24 * 8 + 3 * 8 * 6 + 24 * 6)),  # an expert without rows is not read
        ("forward", None, {"permute_x": True}, 2 * (12 * 8 + 4 * 8 * 6 + 24 * 6)),  # each token's row is read once
        ("forward", None, {"dtype": "float32"}, 4 * (24 * 8 + 4 * 8 * 6 + 24 * 6)),
        ("dx", 3, {}, 2 * (24 * 6 + 3 * 8 * 6 + 24 * 8)),
        ("dw", 3, {}, 2 * (24 * 8 + 24 * 6) + 2 * 4 * 8 * 6),  # zeros are written for an expert without rows
    ],
)
def test_bytes_of_a_product(op, experts, options, num_bytes):
    assert workloads.gemm(**SIZES, **options).bytes_accessed(op, experts) == num_bytes


def test_dw_is_written_in_its_dtype():
    problem = dataclasses.replace(workloads.gemm(**SIZES), dw_dtype=jnp.dtype("float32"))
    assert problem.bytes_accessed("dw") == 2 * (24 * 8 + 24 * 6) + 4 * 4 * 8 * 6


def test_bytes_of_a_product_of_few_rows_are_of_as_many_experts():
    sizes = SIZES | {"num_rows": 2}
    assert workloads.gemm(**sizes).bytes_accessed() == 2 * (2 * 8 + 2 * 8 * 6 + 2 * 6)


def test_bytes_of_a_product_in_fp8_have_scales():
    problem = workloads.gemm(num_rows=24, in_features=320, out_features=160, num_experts=4, topk=2, dtype="fp8")
    values, y = 24 * 320 + 3 * 320 * 160, 2 * 24 * 160
    scales = 4 * (24 * 3 + 3 * 3 * 2)  # of 128 features of a row; of 128 x 128 of a matrix
    assert problem.bytes_accessed("forward", 3) == values + scales + y
