"""The gated delta rule and its gradients in float64, token after token, and what runs jgg's on the same arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jgg.models.delta_rule import delta_rule

SCALE, EPSILON = 0.37, 1e-3
# batch, length, key heads, value heads, K, V
SIZES = {
    "chunks": (2, 131, 2, 4, 16, 32),
    "one chunk": (1, 64, 1, 1, 16, 16),
    "odd": (2, 70, 1, 3, 5, 7),
    "short": (2, 17, 2, 2, 8, 4),
    "one token": (3, 1, 2, 4, 8, 8),
    "none": (2, 0, 1, 2, 4, 4),
}


class Rule64:
    """The rule for one row and one value head, token after token, and its gradients by hand."""

    def __init__(self, q, k, v, log_decay, beta, state, resets):
        self.roots = [1 / np.sqrt(np.sum(x * x, -1, keepdims=True) + EPSILON) for x in (q, k)]
        self.q, self.k = q * self.roots[0], k * self.roots[1]
        self.decay = np.where(resets, 0, np.exp(log_decay))
        self.v, self.beta, self.befores, self.states = v, beta, [], [state]
        for k_t, v_t, decay, beta_t in zip(self.k, v, self.decay, beta, strict=True):
            before = decay * self.states[-1]
            self.befores.append(before)
            self.states.append(before + beta_t * np.outer(k_t, v_t - k_t @ before))
        self.y = np.reshape([SCALE * q_t @ s for q_t, s in zip(self.q, self.states[1:], strict=True)], v.shape)

    def gradients(self, dy, d_state):
        dq, dk, dv, d_log, d_beta = (np.zeros_like(x) for x in (self.q, self.k, self.v, self.decay, self.beta))
        for t in reversed(range(len(dy))):
            k, before = self.k[t], self.befores[t]
            dq[t] = SCALE * self.states[t + 1] @ dy[t]
            d_state = d_state + SCALE * np.outer(self.q[t], dy[t])
            error = self.v[t] - k @ before
            d_beta[t] = k @ d_state @ error
            dv[t] = self.beta[t] * k @ d_state
            dk[t] = self.beta[t] * d_state @ error - before @ dv[t]
            d_state = d_state - np.outer(k, dv[t])
            d_log[t] = np.sum(d_state * before)
            d_state = self.decay[t] * d_state
        dq, dk = (
            root * (d - x * np.sum(x * d, -1, keepdims=True))
            for root, x, d in zip(self.roots, (self.q, self.k), (dq, dk), strict=True)
        )
        return dq, dk, dv, d_log, d_beta, d_state


def rule64(arrays, resets, dy, d_state):
    """(y, last states), and the gradients of all arrays."""
    arrays = [np.asarray(array, np.float64) for array in arrays]
    _, k, v, *_, state = arrays
    y, last, gradients = np.zeros(v.shape), np.zeros(state.shape), [np.zeros(array.shape) for array in arrays]
    group = v.shape[2] // k.shape[2]
    for row in range(v.shape[0]):
        for head in range(v.shape[2]):
            places = [(row, slice(None), head // group)] * 2 + [(row, slice(None), head)] * 3 + [(row, head)]
            rule = Rule64(*(array[place] for array, place in zip(arrays, places, strict=True)), resets[row])
            y[row, :, head], last[row, head] = rule.y, rule.states[-1]
            of_head = rule.gradients(dy[row, :, head], d_state[row, head])
            for gradient, place, own in zip(gradients, places, of_head, strict=True):
                gradient[place] += own
    return (y, last), gradients


def random(size, seed=0, dtype="float32"):
    """The arrays in the order of the function's arguments, resets, and gradients of both results."""
    batch, length, key_heads, value_heads, features, value_features = size
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((batch, length, key_heads, features)) for _ in range(2))
    k[:, :, :, : features // 2] += 1  # so that keys are alike, and corrections are not small
    v, dy = (rng.standard_normal((batch, length, value_heads, value_features)) for _ in range(2))
    log_decay = -np.exp(rng.uniform(-6, 3, (batch, length, value_heads)))
    beta = rng.uniform(0, 1, (batch, length, value_heads))
    beta[:, ::5], log_decay[:, ::5] = 0, 0
    state, d_state = (rng.standard_normal((batch, value_heads, features, value_features)) for _ in range(2))
    in_dtype = [jnp.asarray(x, dtype) for x in (q, k, v)]
    in_float32 = [jnp.asarray(x, jnp.float32) for x in (log_decay, beta, state)]
    return (
        [*in_dtype, *in_float32],
        jnp.asarray(rng.uniform(size=(batch, length)) < 0.06),
        jnp.asarray(dy, dtype),
        d_state,
    )


@functools.partial(jax.jit, static_argnames=("implementation", "in_order"))
def run(arrays, resets, implementation, in_order=False):
    *others, state = arrays
    options = {"scale": SCALE, "epsilon": EPSILON, "implementation": implementation, "in_order": in_order}
    return delta_rule(*others, state=state, resets=resets, **options)


@functools.partial(jax.jit, static_argnames=("implementation", "in_order"))
def run_and_gradients(arrays, resets, dy, d_state, implementation, in_order=False):
    options = {"resets": resets, "implementation": implementation, "in_order": in_order}
    results, vjp = jax.vjp(functools.partial(run, **options), arrays)
    return results, vjp((dy, jnp.asarray(d_state, jnp.float32)))[0]
