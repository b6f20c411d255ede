"""Prints a table of errors against float64, of jgg's three products and XLA's dense product: python tools/numerics.py.

Each row has a dtype and a reduced length, which is K in the forward product, N in dX, and a group's rows in dW. An
error is the largest error of an element, relative to the product's largest element. In some rows all terms of a sum but
one in 64 cancel; there, errors are relative to the largest sum of the terms' magnitudes.
"""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jgg
from jgg.cli.info import devices, versions

DTYPES = (
    ("float32", "default"),
    ("float32", "high"),
    ("float32", "highest"),
    ("float16", None),
    ("bfloat16", None),
)
PRODUCTS = ("forward", "dx", "dw")
LENGTHS = (64, 512, 4096, 32768)
GROUPS, ROWS, COLUMNS = 3, 40, 48  # each group's product is [ROWS, length] @ [length, COLUMNS]


def operands(rng, dtype, length, cancels):
    """Makes random left [G, ROWS, length] and right [G, length, COLUMNS] of dtype."""
    left = rng.standard_normal((GROUPS, ROWS, length)).astype(dtype)
    right = rng.standard_normal((GROUPS, length, COLUMNS)).astype(dtype)
    if cancels:
        # the second half of each sum is minus the first, but for one term in 64
        half = length // 2
        left[:, :, half:] = left[:, :, :half]
        right[:, half:] = -right[:, :half]
        right[:, half::64] = 0
    return left, right


def grouped(product, left, right, precision, implementation):
    """The products of all groups by jgg, [G, ROWS, COLUMNS]."""
    options = {"precision": precision, "implementation": implementation, "w_layout": "ekn"}
    if product == "dw":  # dw[g] = x[rows of g]^T @ dy[rows of g]
        x, dy = left.swapaxes(1, 2).reshape(-1, ROWS), right.reshape(-1, COLUMNS)
        sizes = jnp.full(GROUPS, left.shape[2], jnp.int32)
        return jgg.grouped_gemm_dw(x, dy, group_sizes=sizes, **options)
    rows, sizes = left.reshape(-1, left.shape[2]), jnp.full(GROUPS, ROWS, jnp.int32)
    if product == "forward":
        out = jgg.grouped_gemm_forward(rows, right, group_sizes=sizes, **options)
    else:  # dx = dy @ w^T
        out = jgg.grouped_gemm_dx(rows, right.swapaxes(1, 2), group_sizes=sizes, **options)
    return out.reshape(GROUPS, ROWS, COLUMNS)


def dense(left, right, precision):
    """The products of all groups by XLA's dense product, accumulated in float32."""
    out = jnp.einsum("grk,gkc->grc", left, right, precision=precision, preferred_element_type=jnp.float32)
    return out.astype(left.dtype)


def measure(dtype, precision, length, cancels, implementation):
    """Returns the errors of jgg's products and of XLA's dense product, by name."""
    left, right = operands(np.random.default_rng(length), jnp.dtype(dtype), length, cancels)
    exact_left, exact_right = left.astype(np.float64), right.astype(np.float64)
    exact = exact_left @ exact_right
    scale = np.max(np.abs(exact_left) @ np.abs(exact_right) if cancels else np.abs(exact))
    arrays = jnp.asarray(left), jnp.asarray(right)
    runs = {p: functools.partial(grouped, p, implementation=implementation) for p in PRODUCTS} | {"dense": dense}
    return {
        name: float(np.max(np.abs(np.asarray(jax.jit(functools.partial(run, precision=precision))(*arrays)) - exact)))
        / float(scale)
        for name, run in runs.items()
    }


def table(rows):
    """The rows as Markdown."""
    lines = [
        "| dtype | precision | reduced length | sums | forward | dX | dW | XLA's dense product |",
        "|" + " --- |" * 8,
    ]
    for row in rows:
        errors = [f"{row[name]:.1e}" for name in (*PRODUCTS, "dense")]
        kind = "cancel" if row["cancels"] else "random"
        lines.append(
            f"| {row['dtype']} | {row['precision'] or ''} | {row['length']:,} | {kind} | " + " | ".join(errors) + " |"
        )
    return "\n".join(lines)


def main():
    """Measures, prints the table and writes PREFIX.json and PREFIX.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", choices=("triton", "xla"), default=None)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--out", metavar="PREFIX", default="jgg-numerics", help="of the files written (%(default)s)")
    options = parser.parse_args()
    rows = []
    for cancels in (False, True):
        for dtype, precision in DTYPES:
            for length in options.lengths:
                errors = measure(dtype, precision, length, cancels, options.implementation)
                rows.append({"dtype": dtype, "precision": precision, "length": length, "cancels": cancels, **errors})
    device = devices()[0].kind
    implementation = options.implementation or "default"
    content = {"implementation": implementation, "device": device, "versions": versions(), "rows": rows}
    Path(f"{options.out}.json").write_text(json.dumps(content, indent=2) + "\n")
    text = f"implementation {implementation}, {device}\n\n{table(rows)}\n"
    Path(f"{options.out}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
