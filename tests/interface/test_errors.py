"""Every error of an argument: its type, and that it names the argument, what was expected and what came."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import jgg
from jgg.core.gpu_target import Target
from jgg.launching import choice
from tests.support import processes


def zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


def indices(*shape, dtype="int32"):
    return jnp.zeros(shape, dtype)


def general(numbers=None, contracted=((0,), (0,)), batch=((), ()), ragged=(0,), group=(), group_sizes=None, **options):
    """ragged_dot_general of lhs [8, 5] and rhs [8, 7], whose sums over the rows of 3 groups are right."""
    numbers = numbers or jax.lax.RaggedDotDimensionNumbers((contracted, batch), ragged, group)
    group_sizes = indices(3) if group_sizes is None else group_sizes
    return jgg.ragged_dot_general(zeros(8, 5), zeros(8, 7), group_sizes, numbers, **options)


RIGHT = {"x": zeros(8, 5), "w": zeros(3, 7, 5), "group_sizes": indices(3)}
PERMUTED = {"topk": 2, "permute_x": True, "x": zeros(4, 5), "gather_indices": indices(8)}

# what differs from RIGHT, the error, and parts of its message
GROUPED_GEMM_ERRORS = [
    ({"w_layout": "nek"}, ValueError, "w_layout must be one of ('enk', 'ekn'), got 'nek'"),
    ({"topk": 0}, ValueError, "topk must be a positive int, got 0"),
    ({"topk": 2.0}, TypeError, "topk must be a positive int, got 2.0"),
    ({"x": indices(8, 5)}, TypeError, "x must be one of float32, float16, bfloat16, got int32"),
    ({"w": indices(3, 7, 5)}, TypeError, "w must be one of float32, float16, bfloat16, got int32"),
    ({"w": zeros(3, 7, 5, dtype="bfloat16")}, TypeError, "w must have the dtype of x, float32, got bfloat16"),
    ({"x": zeros(2, 8, 5)}, ValueError, "x must be [M, K], 2-dimensional, got [2, 8, 5]"),
    ({"w": zeros(7, 5)}, ValueError, "w must be [E, N, K] or [E, K, N], 3-dimensional, got [7, 5]"),
    ({"w": zeros(3, 7, 6)}, ValueError, "w must be [E, N, K] with K equal to x's 5, got w [3, 7, 6] (w_layout='enk')"),
    ({"w_layout": "ekn"}, ValueError, "w must be [E, K, N] with K equal to x's 5, got w [3, 7, 5] (w_layout='ekn')"),
    ({"group_sizes": zeros(3)}, TypeError, "group_sizes must be an integer array, got float32"),
    ({"group_sizes": indices(3, dtype="bool")}, TypeError, "group_sizes must be an integer array, got bool"),
    ({"group_sizes": indices(3, 1)}, ValueError, "group_sizes must be [E], 1-dimensional, got [3, 1]"),
    ({"group_sizes": indices(4)}, ValueError, "group_sizes must be [E] with E equal to w's 3, got [4]"),
    ({"permute_x": True}, ValueError, "gather_indices must be given with permute_x or permute_y"),
    ({"permute_y": True}, ValueError, "gather_indices must be given with permute_x or permute_y"),
    ({"gather_indices": zeros(8)}, TypeError, "gather_indices must be an integer array, got float32"),
    ({"gather_indices": indices(4, 2)}, ValueError, "gather_indices must be [M], 1-dimensional, got [4, 2]"),
    (
        {"gather_indices": indices(9), "permute_y": True},
        ValueError,
        "gather_indices must have M rows with M equal to x's 8, got 9",
    ),
    (
        PERMUTED | {"gather_indices": indices(9)},
        ValueError,
        "gather_indices must have M rows with M equal to x's 4 tokens times topk 2, got 9",
    ),
    ({"topk_weights": indices(8)}, TypeError, "topk_weights must be one of float32, float16, bfloat16, got int32"),
    ({"topk_weights": zeros(7)}, ValueError, "topk_weights must be [M] or [T, topk], here [8] or [8, 1], got [7]"),
    (
        PERMUTED | {"topk_weights": zeros(2, 4)},
        ValueError,
        "topk_weights must be [M] or [T, topk], here [8] or [4, 2], got [2, 4]",
    ),
    ({"bias": indices(3, 7)}, TypeError, "bias must be one of float32, float16, bfloat16, got int32"),
    ({"bias": zeros(3, 5)}, ValueError, "bias must be [E, N] = [3, 7], got [3, 5]"),
    (
        {"preferred_element_type": jnp.int32},
        TypeError,
        "preferred_element_type must be one of float32, float16, bfloat16, got int32",
    ),
    ({"precision": "exact"}, ValueError, "precision must be None, a jax.lax.Precision, a pair"),
    ({"precision": "exact"}, ValueError, "got 'exact'"),
    ({"precision": ["high"]}, ValueError, "precision must be None"),
    (
        {"implementation": "cuda"},
        ValueError,
        "implementation must be one of ('triton', 'xla', 'interpret') or None, got 'cuda'",
    ),
    (
        {"kernel_config_fwd": jgg.KernelConfigDX()},
        TypeError,
        "kernel_config_fwd must be a KernelConfigForward or None, got KernelConfigDX",
    ),
    ({"kernel_config_bwd_dx": {}}, TypeError, "kernel_config_bwd_dx must be a KernelConfigDX or None, got dict"),
    (
        {"kernel_config_bwd_dw": jgg.KernelConfigForward()},
        TypeError,
        "kernel_config_bwd_dw must be a KernelConfigDW or None, got KernelConfigForward",
    ),
]


def message_alone(value):
    """The id of a test: its message."""
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(("changes", "error", "message"), GROUPED_GEMM_ERRORS, ids=message_alone)
def test_grouped_gemm(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        jgg.grouped_gemm(**RIGHT | changes)
    # a shape is wrong when the function is traced, before there are values
    arrays = {name: value for name, value in (RIGHT | changes).items() if isinstance(value, jax.Array)}
    static = {name: value for name, value in changes.items() if name not in arrays}
    with pytest.raises(error, match=re.escape(message)):
        jax.eval_shape(lambda arrays: jgg.grouped_gemm(**arrays, **static), arrays)


def test_arguments_of_these_tests_are_otherwise_right():
    assert jgg.grouped_gemm(**RIGHT).shape == (8, 7)
    assert jgg.grouped_gemm(**RIGHT | PERMUTED).shape == (8, 7)


PRODUCT_ERRORS = [
    (
        lambda: jgg.grouped_gemm_forward(**RIGHT, kernel_config=jgg.KernelConfigDW()),
        TypeError,
        "kernel_config must be a KernelConfigForward or None, got KernelConfigDW",
    ),
    (
        lambda: jgg.grouped_gemm_dx(zeros(8, 7), zeros(3, 7, 5), group_sizes=indices(3), kernel_config=1),
        TypeError,
        "kernel_config must be a KernelConfigDX or None, got int",
    ),
    (
        lambda: jgg.grouped_gemm_dw(zeros(8, 5), zeros(8, 7), group_sizes=indices(3), kernel_config=1),
        TypeError,
        "kernel_config must be a KernelConfigDW or None, got int",
    ),
    (
        lambda: jgg.grouped_gemm_dx(zeros(8, 6), zeros(3, 7, 5), group_sizes=indices(3)),
        ValueError,
        "w must be [E, N, K] with N equal to dy's 6, got w [3, 7, 5] (w_layout='enk')",
    ),
    (
        lambda: jgg.grouped_gemm_dx(zeros(7), zeros(3, 7, 5), group_sizes=indices(3)),
        ValueError,
        "dy must be [M, N], 2-dimensional, got [7]",
    ),
    (
        lambda: jgg.grouped_gemm_dx(zeros(8, 7, dtype="float16"), zeros(3, 7, 5), group_sizes=indices(3)),
        TypeError,
        "w must have the dtype of dy, float16, got float32",
    ),
    (
        lambda: jgg.grouped_gemm_dx(
            zeros(9, 7), zeros(3, 7, 5), group_sizes=indices(3), topk=2, gather_indices=indices(9), permute_x=True
        ),
        ValueError,
        "dy must have a multiple of topk 2 rows, got 9",
    ),
    (
        lambda: jgg.grouped_gemm_dw(zeros(8, 5), zeros(9, 7), group_sizes=indices(3)),
        ValueError,
        "dy must have M rows with M equal to x's 8, got 9",
    ),
    (
        lambda: jgg.grouped_gemm_dw(zeros(8, 5), zeros(8, 7, dtype="bfloat16"), group_sizes=indices(3)),
        TypeError,
        "dy must have the dtype of x, float32, got bfloat16",
    ),
    (lambda: jgg.ragged_dot(zeros(5), zeros(3, 5, 7), indices(3)), ValueError, "lhs must be"),
    (lambda: jgg.ragged_dot(zeros(8, 5), zeros(3, 6, 7), indices(3)), ValueError, "rhs must be"),
    (
        lambda: jgg.ragged_dot(zeros(8, 5), zeros(3, 5, 7, dtype="int8"), indices(3)),
        TypeError,
        "rhs must be one of float32, float16, bfloat16, got int8; jax.lax.ragged_dot takes others",
    ),
    (lambda: jgg.ragged_dot(zeros(8, 5), None, indices(3)), TypeError, "rhs must be an array, got None"),
    (
        lambda: general(preferred_element_type="int32"),
        TypeError,
        "preferred_element_type must be one of float32, float16, bfloat16, got int32",
    ),
    (lambda: jgg.ragged_dot(zeros(8, 5), zeros(3, 5, 7), indices(4)), ValueError, "group_sizes must be"),
    (
        lambda: jgg.ragged_dot(zeros(8, 5), zeros(3, 5, 7), indices(4), group_offset=zeros(1)),
        TypeError,
        "group_offset must be an integer",
    ),
    (
        lambda: jgg.ragged_dot(zeros(8, 5), zeros(3, 5, 7), indices(4), group_offset=indices(2)),
        ValueError,
        "group_offset must be",
    ),
    (
        lambda: jgg.ragged_dot(zeros(8, 5), zeros(3, 5, 7), indices(3), out_sharding="rows"),
        TypeError,
        "out_sharding must be a jax.NamedSharding, a jax.P or None, got str",
    ),
    (
        lambda: general(numbers=(((0,), (0,)), ((), ()))),
        TypeError,
        "ragged_dot_dimension_numbers must be a jax.lax.RaggedDotDimensionNumbers, got tuple",
    ),
    (
        lambda: general(contracted=((2,), (0,))),
        ValueError,
        "ragged_dot_dimension_numbers must have different dimensions of lhs [8, 5], got [2]",
    ),
    (
        lambda: general(group=[0]),
        ValueError,
        "ragged_dot_dimension_numbers must have different dimensions of rhs [8, 7], got [0, 0]",
    ),
    (
        lambda: general(ragged=[0, 1]),
        ValueError,
        "ragged_dot_dimension_numbers must have one lhs_ragged_dimensions, got [0, 1]",
    ),
    (
        lambda: general(contracted=((), ()), batch=((0,), (0,))),
        ValueError,
        "ragged_dot_dimension_numbers must have a ragged dimension of lhs that is free or contracted, got 0 "
        "of the batch dimensions [0], where groups make no difference to jax.lax.dot_general",
    ),
    (
        lambda: general(contracted=((), ())),
        ValueError,
        "ragged_dot_dimension_numbers must have 1 rhs_group_dimensions where the ragged dimension of lhs is "
        "free, got []",
    ),
    (
        lambda: general(group=[1]),
        ValueError,
        "ragged_dot_dimension_numbers must have 0 rhs_group_dimensions where the ragged dimension of lhs is "
        "contracted, got [1]",
    ),
    (
        lambda: general(contracted=((0,), (1,))),
        ValueError,
        "rhs must have contracted dimensions equal to lhs's [8], got [7]",
    ),
    (lambda: general(group_sizes=indices(2, 3)), ValueError, "group_sizes must be [g], got [2, 3]"),
    (
        lambda: general(group_offset=indices(1)),
        ValueError,
        "group_offset must be None where the ragged dimension is contracted, got an array",
    ),
    (lambda: jgg.sort_by_expert(zeros(8, 2), 4), TypeError, "topk_indices must be an integer array, got float32"),
    (lambda: jgg.target(75), ValueError, "compute_capability must be 80 or more (sm_80, Ampere), got 75"),
]


@pytest.mark.parametrize(("call", "error", "message"), PRODUCT_ERRORS, ids=message_alone)
def test_other_functions(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


CONFIG_ERRORS = {
    **{
        f"{name}-{value}": ({name: value}, f"{name} must be a power of two of at least 16, got {value}")
        for name in ("block_m", "block_n", "block_k")
        for value in (8, 48, 0, -16, 64.0)
    },
    **{
        f"{name}-{value}": ({name: value}, f"{name} must be a positive int, got {value}")
        for name in ("num_warps", "num_stages", "band", "programs_per_sm")
        for value in (0, -1, 2.0)
    },
    **{f"num_warps-{value}": ({"num_warps": value}, f"num_warps must be 4 or 8, got {value}") for value in (3, 16)},
    "kernel": ({"kernel": "volta"}, "kernel must be one of ('plain', 'hopper'), got 'volta'"),
}


@pytest.mark.parametrize(("arguments", "message"), CONFIG_ERRORS.values(), ids=CONFIG_ERRORS.keys())
@pytest.mark.parametrize("config", [jgg.KernelConfigForward, jgg.KernelConfigDX, jgg.KernelConfigDW])
def test_kernel_config(config, arguments, message):
    (value,) = arguments.values()
    with pytest.raises(TypeError if isinstance(value, float) else ValueError, match=re.escape(message)):
        config(**arguments)


def test_kernel_configs_are_hashable_and_frozen():
    config = jgg.KernelConfigForward(block_m=64)
    assert hash(config) == hash(jgg.KernelConfigForward(block_m=64))
    assert config != jgg.KernelConfigForward()
    with pytest.raises(AttributeError):
        config.block_m = 32


def test_too_many_rows():
    rows = 2**30
    x = jax.ShapeDtypeStruct((rows, 5), "float32")
    with pytest.raises(ValueError, match=re.escape(f"x must have at most 2**30 - 1 routed rows, got {rows}")):
        jax.eval_shape(jgg.grouped_gemm, x, RIGHT["w"], RIGHT["group_sizes"])


def test_triton_on_another_platform():
    @jax.jit
    def function(arguments):
        return jgg.grouped_gemm(**arguments, implementation="triton")

    with pytest.raises(NotImplementedError, match="implementation='triton' is for CUDA"):
        function.trace(RIGHT).lower(lowering_platforms=("cpu",))


def test_a_gpu_without_triton_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(choice, "has_triton", lambda: False)
    gpus = [Target(90, 132, "NVIDIA H100"), Target(90, 132, "NVIDIA H100"), Target(70, 80, "NVIDIA V100"), None]
    for gpu in gpus:  # the last two run in plain JAX with Triton too
        monkeypatch.setattr(choice, "known_target", lambda gpu=gpu: gpu)
        assert choice.is_plain_jax(None)
    monkeypatch.undo()
    monkeypatch.setattr(choice, "has_triton", lambda: False)
    with jgg.target(103):
        jax.jit(jgg.ragged_dot).trace(zeros(8, 5), zeros(3, 5, 7), indices(3))
    with_name, for_export = caplog.messages
    assert "slower than by the kernels for NVIDIA H100" in with_name
    assert "slower than by the kernels for compute capability 10.3" in for_export
    assert "pip install 'jgg[triton]'" in for_export


@pytest.mark.parametrize("implementation", ["triton", "interpret"])
def test_without_triton(implementation):
    program = f"""
import sys
sys.modules["jax_triton"] = None  # as if it were not installed
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "jax_triton" else real(name, *rest)
import jax.numpy as jnp, jgg
try:
    jgg.ragged_dot(jnp.ones((3, 2)), jnp.ones((1, 2, 4)), jnp.array([3]), implementation={implementation!r})
except ImportError as error:
    assert "implementation={implementation!r} needs Triton and jax-triton: pip install" in str(error), error
else:
    raise AssertionError("no error")
"""
    processes.run("-c", program)


CHECKS = {
    "right": ([3, 0, 5], list(range(8)), None),
    "fewer-rows": ([3, 0, 2], None, None),
    "negative": ([3, -2, 5], None, "group_sizes must not be negative, got -2"),
    "too-many": ([3, 4, 5], None, "group_sizes must sum to at most M, 8, got 12"),
    "repeated": ([3, 0, 5], [0, 1, 2, 3, 4, 5, 6, 6], "gather_indices must name each of [0, M) once, 1"),
    "out-of-range": ([3, 0, 5], [0, -1, 2, 3, 8, 5, 6, 7], "gather_indices must name each of [0, M) once, 2"),
    "sum-wraps-around": ([2**31 - 1, 2**31 - 1, 3], None, "group_sizes must sum to at most M, 8"),
}


@pytest.mark.parametrize(("sizes", "gather_indices", "message"), CHECKS.values(), ids=CHECKS.keys())
def test_check_reports_bad_values(sizes, gather_indices, message):
    @jax.jit
    @checkify.checkify
    def function(sizes, gather_indices):
        jgg.check(sizes, 8, gather_indices)

    if gather_indices is not None:
        gather_indices = jnp.array(gather_indices, jnp.int32)
    error, _ = function(jnp.array(sizes, jnp.int32), gather_indices)
    if message is None:
        error.throw()
    else:
        with pytest.raises(checkify.JaxRuntimeError, match=re.escape(message)):
            error.throw()
