"""Coefficients of the Newton-Schulz iterations, by the names that `ns_coeffs` takes."""

from collections.abc import Sequence

import numpy as np

from jgg.core.arguments import as_int, check, check_one_of

type Coefficients = tuple[tuple[float, float, float], ...]
type CoefficientsLike = str | Sequence[float] | Sequence[Sequence[float]]

_SAFETY = 1.01  # so that rounding takes no singular value out of where a polynomial is known to converge

# Jordan et al., Muon, 2024: one polynomial, steep at 0, which takes singular values to about 0.7 to 1.2.
_STANDARD = (3.4445, -4.7750, 2.0315)
# Ahn et al., Dion, 2025: one for each of five iterations.
_DION = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
# Amsel et al., The Polar Express, 2025, https://arxiv.org/abs/2505.16932: each is the best for what the one before
# leaves, down to 1e-3 of the norm. The last converges from there on and is repeated.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.875, -1.25, 0.375),
)
NAMES = "standard", "dion", "polar_express"


def coefficients_of(ns_coeffs: CoefficientsLike, ns_steps: int) -> Coefficients:
    """The a, b and c of each iteration; raises if an argument is wrong."""
    steps = as_int("ns_steps", ns_steps, 1)
    if isinstance(ns_coeffs, str):
        check_one_of("ns_coeffs", ns_coeffs, NAMES)
        if ns_coeffs == "polar_express":
            return _polar_express(steps)
        ns_coeffs = _STANDARD if ns_coeffs == "standard" else _DION
    try:
        numbers = np.asarray(ns_coeffs, np.float64)
    except (TypeError, ValueError):
        numbers = np.zeros(0)
    check(
        numbers.ndim in (1, 2) and numbers.shape[-1] == 3 and numbers.size > 0,
        f"ns_coeffs must be three numbers, three for each iteration, or one of {NAMES}, got {ns_coeffs!r}.",
    )
    a, b, c = numbers.reshape(-1, 3).T.tolist()
    return tuple(zip(a, b, c, strict=True)) * (steps if numbers.ndim == 1 else 1)


def _polar_express(steps: int) -> Coefficients:
    own = [_POLAR_EXPRESS[min(step, len(_POLAR_EXPRESS) - 1)] for step in range(steps)]
    converging = len(_POLAR_EXPRESS) - 1
    return tuple(
        (a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) if step < converging else (a, b, c)
        for step, (a, b, c) in enumerate(own)
    )
