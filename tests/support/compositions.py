"""Random programs of several layers, in which each parameter is trained, frozen or stopped, and plain JAX of the same.

A chain is a few programs over the same layers, one after the other in one process, so that each meets what JAX keeps of
those before it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jgg
from jgg.sharding import interleave, sharded_moe_mlp
from tests.support.closeness import distance

FEATURES, TOKENS, TOPK, RANK = 16, 12, 2, 3
STATES = ("trained", "frozen", "stopped")
WEIGHTS = ("w_gate_up", "w_down", "b_gate_up", "b_down", "low_rank_gate_up", "low_rank_down")  # of sharded_moe_mlp


@dataclasses.dataclass(frozen=True)
class Layer:
    """A residual layer of experts.

    Attributes:
      function: "moe_mlp", or "grouped_gemm" for the same by two products.
      is_quantized: multiplied in FP8, which moe_mlp alone can.
    """

    function: str
    hidden: int
    experts: int
    biased: bool
    low_rank: bool
    is_quantized: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """A gradient of layers.

    Attributes:
      states: of each layer's parameters, by name.
      x: whether x is trained.
      remat: None, "all" for `jax.checkpoint`, "names" with the policy that keeps x and the pre-activation.
      loops: "scan" over layers, which must be equal, or "unrolled".
      batch: "vmap" over two x, or None.
      jitted: or operation by operation.
    """

    layers: tuple[Layer, ...]
    states: tuple[tuple[tuple[str, str], ...], ...]
    x: bool
    remat: str | None
    loops: str
    batch: str | None
    jitted: bool


def chain(seed: int, length: int = 3) -> list[Program]:
    """Programs over the same one to four layers, which are all equal in half of the chains."""
    rng = np.random.default_rng([7, seed])
    flag = lambda: bool(rng.integers(2))  # noqa: E731
    choose = lambda *values: values[rng.integers(len(values))]  # noqa: E731

    def draw():
        function = choose("moe_mlp", "moe_mlp", "moe_mlp", "grouped_gemm")
        hidden, experts = choose((8, 4), (24, 3))
        quantized = function == "moe_mlp" and choose(True, False, False)
        return Layer(function, hidden, experts, flag(), flag(), quantized)

    count, equal = int(choose(1, 2, 2, 3, 4)), flag()
    first = draw()
    layers = tuple(first if equal else draw() for _ in range(count))

    def program():
        loops = choose("scan", "unrolled") if equal else "unrolled"
        # the layers of a scan are one array for each parameter
        drawn = [draw_states(layer) for layer in layers]
        states = drawn[:1] * count if loops == "scan" else drawn
        return Program(
            layers,
            tuple(states),
            flag(),
            choose(None, "all", "names"),
            loops,
            choose(None, None, "vmap"),
            choose(True, True, True, False),
        )

    def draw_states(layer):
        # often all alike, as when all experts are frozen
        alike = choose(None, *STATES)
        return tuple((name, alike or choose(*STATES)) for name in shapes(layer))

    return [program() for _ in range(length)]


def shapes(layer: Layer) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's parameters."""
    hidden, experts = layer.hidden, layer.experts
    own = {
        "logits": (TOKENS, experts),
        "w_gate_up": (experts, FEATURES, 2 * hidden),
        "w_down": (experts, hidden, FEATURES),
    }
    if layer.biased:
        own |= {"b_gate_up": (experts, 2 * hidden), "b_down": (experts, FEATURES)}
    if layer.low_rank:
        own |= {
            "a_gate_up": (experts, FEATURES, RANK),
            "b_of_gate_up": (experts, RANK, 2 * hidden),
            "a_down": (experts, hidden, RANK),
            "b_of_down": (experts, RANK, FEATURES),
        }
    return own


def arrays(program: Program, seed: int):
    """x, with a leading axis of two for vmap; parameters and choices [T, k] of each layer, stacked for a scan."""
    rng = np.random.default_rng([8, seed])

    def of_layer(layer):
        params = {
            name: (rng.normal(size=shape) / (shape[1] if len(shape) == 3 else 4) ** 0.5).astype(np.float32)
            for name, shape in shapes(layer).items()
        }
        chosen = np.stack([rng.permutation(layer.experts)[:TOPK] for _ in range(TOKENS)]).astype(np.int32)
        return params, chosen

    x = rng.normal(size=((2,) if program.batch else ()) + (TOKENS, FEATURES)).astype(np.float32)
    layers = [of_layer(layer) for layer in program.layers]
    if program.loops == "scan":
        layers = [jax.tree.map(lambda *leaves: np.stack(leaves), *layers)]
    return jax.tree.map(jnp.asarray, (x, [params for params, _ in layers], [chosen for _, chosen in layers]))


def results_and_gradients(program: Program, run_layer, seed: int, place=lambda name, array: array):
    """The last features, and the gradients of what is trained or stopped.

    Args:
      run_layer: (layer, x, parameters, choices) -> what the layer adds to x; such as `plain_layer`.
      place: (name of a parameter, array) -> the array, split over devices as it says.
    """
    x, params, chosen = arrays(program, seed)
    some, others = {}, {}
    for number, states in enumerate(program.states[: len(params)]):
        for name, state in states:
            (others if state == "frozen" else some)[f"{number}.{name}"] = params[number][name]
    (some if program.x else others)["x"] = x
    both = jax.value_and_grad(functools.partial(_loss, program, run_layer, chosen, place), has_aux=True)
    (_, y), gradients = (jax.jit(both) if program.jitted else both)(some, others)
    return y, gradients


def check(program: Program, got, want, what: str) -> None:
    """Checks results and gradients by jgg against those by plain JAX; `what` names the program."""
    (y, gradients), (want_y, want_gradients) = got, want
    tolerance = 0.25 if any(layer.is_quantized for layer in program.layers) else 1e-4
    assert distance(y, want_y) < tolerance, what
    assert gradients.keys() == want_gradients.keys()
    for name, expected in want_gradients.items():
        if np.any(expected):
            assert distance(gradients[name], expected) < tolerance, f"{name} of {what}"
        else:
            assert not np.any(gradients[name]), f"{name} of {what}"


def _loss(program, run_layer, chosen, place, some, others):
    everything = {name: place(name.split(".")[-1], array) for name, array in (some | others).items()}

    def params_of(number):
        own = {name: (state, everything[f"{number}.{name}"]) for name, state in program.states[number]}
        return {name: jax.lax.stop_gradient(a) if state == "stopped" else a for name, (state, a) in own.items()}

    def body(layer, x, params, chosen):
        run = functools.partial(run_layer, layer)
        policy = jax.checkpoint_policies.save_only_these_names("jgg_x", "jgg_pre_activation")
        if program.remat:
            run = jax.checkpoint(run, policy=policy if program.remat == "names" else None)
        return x + run(x, params, chosen) / 2

    def model(x):
        if program.loops == "scan":
            step = lambda x, own: (body(program.layers[0], x, *own), None)  # noqa: E731
            return jax.lax.scan(step, x, (params_of(0), chosen[0]))[0]
        for number, layer in enumerate(program.layers):
            x = body(layer, x, params_of(number), chosen[number])
        return x

    y = (jax.vmap(model) if program.batch else model)(everything["x"])
    return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)), y


def own_layer(layer, x, params, chosen, implementation=None):
    """The layer by jgg's functions for one device."""
    routing = jgg.route(params["logits"], TOPK, topk_indices=chosen, implementation=implementation)
    terms = {"gate_up": None, "down": None}
    if layer.low_rank:
        terms = {name: jgg.LowRank(params[f"a_{name}"], params[f"b_of_{name}"], 0.5) for name in terms}
    options = {"w_layout": "ekn", "precision": "highest", "implementation": implementation}
    biases = params.get("b_gate_up"), params.get("b_down")
    if layer.function == "moe_mlp":
        return jgg.moe_mlp(
            x,
            params["w_gate_up"],
            params["w_down"],
            routing,
            b_gate_up=biases[0],
            b_down=biases[1],
            low_rank_gate_up=terms["gate_up"],
            low_rank_down=terms["down"],
            quantization=jgg.Fp8() if layer.is_quantized else None,
            **options,
        )
    sizes, indices = routing.group_sizes, routing.gather_indices
    pre_activation = jgg.grouped_gemm(
        x, params["w_gate_up"], sizes, TOPK, indices, True, bias=biases[0], low_rank=terms["gate_up"], **options
    )
    gate, up = jnp.split(pre_activation, 2, axis=1)
    rows = jgg.grouped_gemm(
        jax.nn.silu(gate) * up,
        params["w_down"],
        sizes,
        TOPK,
        indices,
        False,
        True,
        routing.topk_weights,
        biases[1],
        low_rank=terms["down"],
        **options,
    )
    return jnp.sum(rows.reshape(TOKENS, TOPK, FEATURES), axis=1)


def sharded_layer(layer, x, params, chosen, sharding):
    """The layer on a mesh; gates and ups alternate, so that an axis may split them."""
    routing = jgg.route(params["logits"], TOPK, topk_indices=chosen)
    columns = "w_gate_up", "b_gate_up", "b_of_gate_up"
    own = {name: interleave(array) if name in columns else array for name, array in params.items()}
    if layer.low_rank:
        for name in ("gate_up", "down"):
            own[f"low_rank_{name}"] = jgg.LowRank(own[f"a_{name}"], own[f"b_of_{name}"], 0.5)
    y, _ = sharded_moe_mlp(
        x,
        topk_weights=routing.topk_weights,
        topk_indices=routing.topk_indices,
        **{name: array for name, array in own.items() if name in WEIGHTS},
        sharding=sharding,
        interleaved=True,
        w_layout="ekn",
        precision="highest",
        quantization=jgg.Fp8() if layer.is_quantized else None,
    )
    return y


def plain_layer(layer, x, params, chosen):
    """The layer by plain JAX: every expert computes every token, in float32, also where jgg multiplies in FP8."""
    is_chosen = chosen[:, :, None] == jnp.arange(layer.experts, dtype=jnp.int32)[None, None]  # [T, k, E]
    chosen_logits = jnp.sum(jnp.where(is_chosen, params["logits"][:, None], 0), axis=2)
    weights = jnp.sum(jnp.where(is_chosen, jax.nn.softmax(chosen_logits)[:, :, None], 0), axis=1)  # [T, E]

    def product(x, name):
        w = params[f"w_{name}"]
        if layer.low_rank:  # as in jgg, a term freezes its weights
            w = jax.lax.stop_gradient(w) + 0.5 * jnp.einsum(
                "ekr,ern->ekn", params[f"a_{name}"], params[f"b_of_{name}"], precision="highest"
            )
        y = jnp.einsum("etk,ekn->etn", x, w, precision="highest")
        return y + params[f"b_{name}"][:, None] if layer.biased else y

    gate, up = jnp.split(product(jnp.broadcast_to(x, (layer.experts, *x.shape)), "gate_up"), 2, axis=2)
    return jnp.einsum("te,eth->th", weights, product(jax.nn.silu(gate) * up, "down"), precision="highest")
