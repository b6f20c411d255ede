"""The letters of every product's axes, by which `partitioning` splits it over devices."""

import dataclasses

from jgg.implementations.partitioning import ROWS, WHOLE, Axes
from jgg.schedule import GroupBounds


def axes_of_product(*leaves, product, implementation, structure, problem, **_) -> Axes:
    """Those of the operands and results that a product has: k and n features, e experts, t independent rows."""
    x, y, w, bias = ROWS + "k", ROWS + "n", getattr(problem, "w_layout", None), "en"
    bounds = ("e",) * len(GroupBounds._fields)
    each = "t" + WHOLE
    names, results, summed = {
        "forward": ((x, w, bounds, ROWS, None, bias), (y,), ("ek",)),
        "backward_dx": ((y, w, x, bounds, ROWS, None), (x, ROWS), ("en", "enk")),
        "backward_dw": ((x, y, bounds, ROWS, None), (w, bias), ("", "")),
        "combine": ((y, ROWS, None), (y,), ("",)),
        "activate": ((each,), (each,), ("",)),
        "activate_backward": ((each, each, "t"), (each, each, "t"), ("", "", "")),
        "top_k": ((each,), (each,), ("",)),
        "sort": ((ROWS,), (WHOLE, ROWS), ("", "")),
    }[product]
    letters, added = [], None
    for array, name in zip(structure.unflatten(leaves), names, strict=True):
        if array is None:
            continue
        if name == bias:
            added = len(letters)
        letters += name if isinstance(name, tuple) else [name or ROWS * array.ndim]  # topk_weights: [M] or [T, k]
    return Axes(tuple(letters), results, summed, _part_of_device, added, by_callback=implementation == "interpret")


def _part_of_device(params, devices):
    """The parameters of a product for one device's part of its features and experts."""
    problem = params["problem"]
    if problem is None:
        return params
    names = {"num_experts": "e", "in_features": "k", "out_features": "n"}
    part = {name: getattr(problem, name) // devices.get(letter, 1) for name, letter in names.items()}
    return params | {"problem": dataclasses.replace(problem, **part)}
