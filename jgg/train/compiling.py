"""Options of XLA for the step of a training loop."""

import jax

from jgg.core.arguments import as_int

# XLA's pass for loops that write every element of an array which they were given filled with zeros. Off by default.
# Source: openxla/xla pull request 42808. All versions of jaxlib that jgg supports have it, and what is below.
_OPTIONS = {"xla_gpu_enable_dus_accumulator_zero_init_elimination": True}

# O1 moves a gather of weights into the iteration of the loop before the one that needs them, and a reduce-scatter of
# gradients into the one after: https://openxla.org/xla/effort_levels. By itself the scheduler would then let one
# collective run at a time, during the last few kernels of an iteration, however many bytes it moves. Only for steps
# that gather weights: with an expert axis alone, XLA of JAX 0.11.2 makes an order at O1 that its own check refuses.
_OF_GATHERS = {
    "optimization_level": "O1",
    "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
}

# XLA's pass that computes again what it would rather not keep. It counts arrays that a loop writes over twice, so it
# finds too little memory wherever weights and state take most of it, and repeats kernels that need not run again.
_IN_BACKWARD = {"xla_disable_hlo_passes": "rematerialization"}


def compiler_options(num_devices: int = 1, *, in_backward: bool = False) -> dict[str, object]:
    """Returns XLA options for `jax.jit` that make a training step faster; empty if there is no GPU.

    `jax.lax.scan` over layers keeps values for the backward pass in stacks, and XLA fills these with zeros first: 12
    GiB in a step of Qwen3-30B-A3B with LoRA and 2 x 4096 tokens. With these options XLA skips the zeros where it can
    tell that the loop writes every element before reading any, so results stay the same.

    Where devices gather weights, as along the fsdp axis of a `jgg.sharding.MoESharding`, collectives overlap with
    compute: the weights of a scan's next layer are gathered while a layer is computed, in both the forward and the
    backward pass, and gradients are sent while the next layer's are computed. This takes memory for the weights of two
    more layers.

    `jgg.train.Trainer` uses them. In a loop of your own:

        options = jgg.train.compiler_options(sharding.size(sharding.fsdp))
        step = jax.jit(step, donate_argnums=0, compiler_options=options)

    JAX takes options only from the outermost `jax.jit`, and `nnx.jit` takes none. With `nnx.jit`, either split the
    model with `nnx.split` and use `jax.jit`, or set the options that begin with xla for the whole process in the
    environment: XLA_FLAGS=--xla_gpu_enable_dus_accumulator_zero_init_elimination=true.

    Args:
      num_devices: number of devices along the axis that weights are gathered over; 1 if none are.
      in_backward: whether the step has an `OptimizerInBackward`. Then XLA recomputes nothing by itself.
    """
    gathers = as_int("num_devices", num_devices, 1) > 1
    options = _OPTIONS | (_OF_GATHERS if gathers else {}) | (_IN_BACKWARD if in_backward else {})
    return dict(options) if jax.default_backend() == "gpu" else {}
