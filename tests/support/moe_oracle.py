"""A NumPy float64 oracle of the expert MLP, one token and choice after the other, and its random data."""

import math

import numpy as np

from jgg.core.activations import ACTIVATIONS


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def gelu_tanh(x):
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def clamped(gate, up, limit=7.0, alpha=1.702):
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * sigmoid(alpha * gate) * (up + 1)


FUNCTIONS = {
    "swiglu": lambda gate, up: gate * sigmoid(gate) * up,
    "geglu": lambda gate, up: gelu(gate) * up,
    "geglu_tanh": lambda gate, up: gelu_tanh(gate) * up,
    "reglu": lambda gate, up: np.maximum(gate, 0) * up,
    "clamped_swiglu": clamped,
    "ungated_silu": lambda up: up * sigmoid(up),
    "ungated_gelu": gelu,
    "ungated_gelu_tanh": gelu_tanh,
    "ungated_relu": lambda up: np.maximum(up, 0),
    "ungated_relu_squared": lambda up: np.maximum(up, 0) ** 2,
}
DATA = {"tokens": 13, "features": 24, "hidden": 20, "experts": 5, "topk": 2}


def make(activation="swiglu", biased=False, w_layout="enk", seed=0, chosen=None, **sizes):
    """Arrays of an MLP and a routing, as NumPy float32; `chosen` replaces the random choice of experts [T, k]."""
    sizes = DATA | sizes
    tokens, features, hidden, experts, topk = sizes.values()
    rng = np.random.default_rng(seed)
    out = hidden * (
        2 if len(FUNCTIONS[activation].__code__.co_varnames) > 1 and ACTIVATIONS[activation].is_gated else 1
    )
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    w_gate_up, w_down = normal(experts, out, features) / features**0.5, normal(experts, features, hidden) / hidden**0.5
    if w_layout == "ekn":
        w_gate_up, w_down = w_gate_up.swapaxes(1, 2), w_down.swapaxes(1, 2)
    if chosen is None:
        chosen = np.stack([rng.permutation(experts)[:topk] for _ in range(tokens)]) if tokens else np.zeros((0, topk))
    floats = {
        "x": normal(tokens, features),
        "w_gate_up": w_gate_up,
        "w_down": w_down,
        "b_gate_up": normal(experts, out) if biased else None,
        "b_down": normal(experts, features) if biased else None,
        "topk_weights": rng.uniform(0.1, 1, (tokens, topk)).astype(np.float32),
    }
    return floats, np.asarray(chosen, np.int32), normal(tokens, features)


def expected(floats, chosen, dy, activation, interleaved, w_layout):
    """y and the gradients of sum(dy * y), one token and choice after the other."""
    f = {name: None if array is None else array.astype(np.float64) for name, array in floats.items()}
    grads = {name: None if array is None else np.zeros(array.shape) for name, array in f.items()}
    y = np.zeros(f["x"].shape)
    up_of, down_of = (
        (lambda w, e: w[e].T) if w_layout == "enk" else (lambda w, e: w[e]) for _ in range(2)
    )  # [in, out], views, so that gradients can be added in place
    for token, choices in enumerate(chosen):
        for choice, e in enumerate(choices):
            if e >= len(f["w_gate_up"]):  # no such expert
                continue
            x, p, d = f["x"][token], f["topk_weights"][token, choice], dy[token].astype(np.float64)
            pre = x @ up_of(f["w_gate_up"], e) + (0 if f["b_gate_up"] is None else f["b_gate_up"][e])
            hidden, d_hidden_to_pre = activate(pre, activation, interleaved)
            product = hidden @ down_of(f["w_down"], e) + (0 if f["b_down"] is None else f["b_down"][e])
            y[token] += p * product
            d_pre = d_hidden_to_pre(p * down_of(f["w_down"], e) @ d)
            grads["topk_weights"][token, choice] = d @ product
            grads["x"][token] += up_of(f["w_gate_up"], e) @ d_pre
            up_of(grads["w_gate_up"], e)[...] += np.outer(x, d_pre)
            down_of(grads["w_down"], e)[...] += np.outer(hidden, p * d)
            if f["b_down"] is not None:
                grads["b_gate_up"][e] += d_pre
                grads["b_down"][e] += p * d
    return y, grads


def activate(pre, activation, interleaved):
    """Hidden features, and the function from their gradient to pre's, by central differences."""
    function, is_gated = FUNCTIONS[activation], ACTIVATIONS[activation].is_gated

    def hidden_of(pre):
        if not is_gated:
            return function(pre)
        return function(*((pre[::2], pre[1::2]) if interleaved else np.split(pre, 2)))

    def transposed(d_hidden):
        step = 1e-6
        moves = step * np.eye(len(pre))
        columns = [(hidden_of(pre + move) - hidden_of(pre - move)) / (2 * step) for move in moves]
        return np.array([column @ d_hidden for column in columns])

    return hidden_of(pre), transposed
