"""Lowers functions for the GPU of `jgg.target`, which need not be here."""

import jax

EXPERTS = 4
OPTIONS = {
    "plain": {},
    "up": {"permute_x": True},
    "down": {"permute_y": True, "weighted": True},
    "scaled": {"weighted": True, "biased": True},
    "everything": {"permute_x": True, "permute_y": True, "weighted": True, "biased": True},
}


def lower(function, *arrays):
    """Lowers a function of arrays, or of their shapes and dtypes, and so compiles its kernels."""
    jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))


def arguments(rows, in_features, out_features, layout, options, dtype, precision):
    """Arrays (shapes and dtypes) and options of grouped_gemm."""
    options = OPTIONS[options]
    num_rows, topk = EXPERTS * rows, 2
    x_rows = num_rows // topk if options.get("permute_x") else num_rows
    w = (out_features, in_features) if layout == "enk" else (in_features, out_features)
    arrays = {
        "x": jax.ShapeDtypeStruct((x_rows, in_features), dtype),
        "w": jax.ShapeDtypeStruct((EXPERTS, *w), dtype),
        "topk_weights": jax.ShapeDtypeStruct((num_rows // topk, topk), "float32"),
        "bias": jax.ShapeDtypeStruct((EXPERTS, out_features), dtype),
        "group_sizes": jax.ShapeDtypeStruct((EXPERTS,), "int32"),
        "gather_indices": jax.ShapeDtypeStruct((num_rows,), "int32"),
    }
    if not options.get("weighted"):
        arrays["topk_weights"] = None
    if not options.get("biased"):
        arrays["bias"] = None
    static = {name: options.get(name, False) for name in ("permute_x", "permute_y")}
    return arrays, {"topk": topk, "w_layout": layout, "precision": precision, **static}
