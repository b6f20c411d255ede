"""Fine-tunes a model from a Hugging Face folder with LoRA, on one device, and writes an adapter that PEFT loads.

    python examples/finetune.py FOLDER --data train.jsonl --output adapter --checkpoints run1
    python examples/generate.py FOLDER adapter --prompt "Once upon a time"

FOLDER has config.json, safetensors files and tokenizer.json. Each line of the data is a JSON object:

    {"prompt": "...", "completion": "..."}    learns the completion and the token that ends a text
    {"text": "..."}                           learns all of it
    {"messages": [{"role": ..., "content": ...}, ...]}    learns the last message alone, which is the assistant's

A row of messages may have "tools". Transformers tokenizes, and writes messages by the folder's chat template. The
adapter's folder notes the tokens that ended what was learned, and generate.py stops at them. With --checkpoints, the
same command run again goes on from the last checkpoint. A loss that is not finite ends the training before anything is
written.

Examples are packed into sequences and attend to themselves alone; the positions that are left at the end of a sequence
count in no loss. Attention is then computed for all pairs of tokens, and masked. With --no-packing each sequence has
one example and attention is causal, whose masked half cuDNN's kernel skips: better for long examples.

MFU is the FLOPs that LoRA needs over what the GPU could do at most in bfloat16. For each token of an example, and each
parameter of a matrix that acts on it (top-k of the experts), they are 2 for the forward pass and 2 for the gradient of
x; adapters need 2 more for their own gradient; attention needs 12 for each feature of the heads and each token attended
to. What rematerialization repeats does not count. Needs `pip install '.[flax,hf]' transformers jinja2`, and the
files beside it that it imports.
"""

import argparse
import contextlib
import functools
import json
import math
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from arguments import enough_memory
from finetune_options import EXPERTS, check_folder, check_same_run, parse
from flax import nnx
from folders import check_vocabulary, end_of, load_tokenizer, one_line, read_config, stop_tokens
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from training_data import batch_of, pack, read_examples

import jgg
import jgg.models

PEAK_FLOPS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12}  # dense bfloat16, by the beginning of a device's name


def balance_weight(config: jgg.models.ModelConfig) -> float:
    """The weight of the routers' balancing loss: the loss of transformers is topk times that of jgg."""
    coefficient = config.hf.get("router_aux_loss_coef")
    coefficient = 0 if coefficient is None else coefficient
    if isinstance(coefficient, bool) or not isinstance(coefficient, int | float) or not 0 <= coefficient < math.inf:
        raise SystemExit(f"router_aux_loss_coef must be a number of at least 0 or null, got {coefficient!r}")
    return coefficient * config.moe.topk


def make_step(graphdef, optimizer, balance_weight: float, is_packed: bool):
    """The jitted step: ((adapters, opt_state), frozen, batch) -> ((adapters, opt_state), loss).

    The loss is NaN where an adapter is not finite after the step.
    """

    def loss_of(adapters, frozen, part, num_learned, num_parts):
        model = nnx.merge(graphdef, adapters, frozen)
        segments = part["segments"] if is_packed else None  # causal attention never sees what follows an example
        call = nnx.capture(model.losses, nnx.Intermediate)
        losses, sown = call(part["tokens"], part["targets"], segments, mask=part["segments"] > 0)
        loss = jnp.sum(losses * part["learned"]) / num_learned
        (balance,) = sown["load_balancing_loss"]
        return loss + balance_weight * jnp.mean(balance) / num_parts, loss

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, frozen, batch):
        adapters, opt_state = state
        num_parts, num_learned = len(batch["tokens"]), jnp.sum(batch["learned"])

        def add(sums, part):
            own = jax.grad(loss_of, has_aux=True)(adapters, frozen, part, num_learned, num_parts)
            return jax.tree.map(jnp.add, sums, own), None

        zeros = jax.tree.map(jnp.zeros_like, adapters), jnp.float32(0)
        (gradients, loss), _ = jax.lax.scan(add, zeros, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, adapters)
        adapters = optax.apply_updates(adapters, updates)
        is_finite = jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(adapters)]).all()
        return (adapters, opt_state), jnp.where(is_finite, loss, jnp.nan)

    return step


class Meter:
    """Measures steps: tokens of examples per second, MFU and memory."""

    def __init__(self, model: jgg.models.Decoder):
        self.config, self.device = model.config, jax.devices()[0]
        self.flops_per_token = 4.0 * self.config.features * self.config.vocabulary  # of the logits
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            name, moe = path[-1], self.config.moe
            if name.startswith("w_") and name not in ("w_embedding", "w_head"):
                is_of_experts = "moe" in path and name.startswith(("w_gate_up", "w_down"))
                share = moe.topk / moe.num_experts if is_of_experts else 1.0
                self.flops_per_token += (6 if "_lora_" in name else 4) * share * math.prod(variable.get_value().shape)
        self.restart()

    def restart(self) -> None:
        self.tokens, self.flops, self.start = 0, 0.0, time.perf_counter()

    def add(self, segments: np.ndarray) -> None:
        """Counts a batch."""
        lengths = np.concatenate([np.bincount(row)[1:] for row in segments.reshape(-1, segments.shape[-1])])
        self.tokens += lengths.sum()
        self.flops += lengths.sum() * self.flops_per_token
        for window in self.config.windows:
            full = lengths if window is None else np.minimum(lengths, window)
            attended = np.sum(full * (full + 1) / 2 + (lengths - full) * full)
            self.flops += 12 * self.config.num_heads * self.config.head_features * attended

    def __str__(self) -> str:
        seconds, name = time.perf_counter() - self.start, self.device.device_kind
        peak = next((flops for kind, flops in PEAK_FLOPS.items() if name.startswith(kind)), None)
        mfu = f"{self.flops / seconds / peak:.1%}" if peak else "unknown"
        memory = (self.device.memory_stats() or {}).get("peak_bytes_in_use")
        gib = f"{memory / 2**30:.1f} GiB" if memory else "unknown"
        return f"{self.tokens / seconds:,.0f} tokens/s, MFU {mfu}, peak memory {gib}"


def prepare(options: argparse.Namespace, config: jgg.models.ModelConfig, steps: int):
    """The model, the function that makes a step, and what it takes: (adapters, opt_state) and the frozen parameters."""
    weight = balance_weight(config)
    with one_line():
        model = jgg.models.load(
            options.folder,
            experts=EXPERTS[options.experts],
            remat=options.remat,
            lora_rank=options.lora_rank,
            lora_alpha=options.lora_alpha,
            lora_targets=tuple(options.targets),
            rngs=nnx.Rngs(options.seed),
        )
    graphdef, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)
    rate, warmup = options.learning_rate, max(1, steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(rate / warmup, rate, warmup, max(steps, warmup + 1))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0))
    step_of = make_step(graphdef, optimizer, weight, options.packing)
    return model, step_of, (adapters, optimizer.init(adapters)), frozen


def read_data(options: argparse.Namespace, config: jgg.models.ModelConfig) -> tuple[dict[str, np.ndarray], list[int]]:
    """The packed data, and the tokens that end a text: those of the folder, and those that end what is learned."""
    tokenizer = load_tokenizer(options.folder)
    examples = read_examples(options, tokenizer)
    check_vocabulary(tokenizer, np.concatenate([ids for ids, _ in examples]), config, options.data)
    ends = {end_of(tokenizer, ids) for ids, _ in examples if len(ids) <= options.sequence_length} - {None}
    ends = list(dict.fromkeys([*stop_tokens(options.folder), *sorted(ends)]))
    return pack(examples, options.sequence_length, options.packing), ends


def open_checkpoints(options: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """The checkpoints, which wait on leaving until all is written; None without --checkpoints."""
    if options.checkpoints is None:
        return contextlib.nullcontext()
    return ocp.CheckpointManager(options.checkpoints.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2))


def restored(manager: Any, state: Any) -> tuple[int, Any]:
    """The last step that was saved, 0 if none was, and the state after it."""
    step = manager.latest_step() if manager is not None else None
    if step is None:
        return 0, state
    abstract = ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
    try:
        return step, manager.restore(step, args=abstract)
    except Exception as error:  # of any type, for files that are damaged or of another model
        text = " ".join(str(error).split())[:200]
        where = manager.directory / str(step)
        raise SystemExit(f"--checkpoints must have steps of this model, got {where}: {text}") from error


def run_steps(step_of, state, frozen, data, options: argparse.Namespace, meter: Meter, steps: int):
    """Trains from the last checkpoint on, prints progress and saves checkpoints; the state at the end."""
    columns, console = (*Progress.get_default_columns(), MofNCompleteColumn()), Console(stderr=True)
    # no automatic refresh: its thread would disturb what is timed
    bar = Progress(*columns, console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
    with open_checkpoints(options) as manager, bar:
        first, state = restored(manager, state)
        step_of = step_of.lower(state, frozen, batch_of(data, 1, options)).compile()
        task, losses = bar.add_task("training", total=steps, completed=first), []
        meter.restart()
        for step in range(first + 1, steps + 1):
            batch = batch_of(data, step, options)
            state, loss = step_of(state, frozen, batch)
            losses.append(loss)
            meter.add(batch["segments"])
            is_logged = step % options.log_every == 0 or step in (first + 1, steps)
            is_saved = manager is not None and (step % options.save_every == 0 or step == steps)
            if is_logged or is_saved:  # waits for the losses
                check_losses(losses, step, manager)
                losses.clear()
            if is_logged:
                print(f"step {step}: loss {float(loss):.4f}, {meter}", flush=True)
                meter.restart()
                bar.update(task, completed=step, refresh=True)
            if is_saved:
                manager.save(step, args=ocp.args.StandardSave(state))  # in the background
    return state


def check_losses(losses: list[jax.Array], step: int, manager: Any) -> None:
    """Ends the program unless the losses of the last steps are finite, the last of them number `step`."""
    for number, loss in enumerate(jax.device_get(losses), step - len(losses) + 1):
        if not np.isfinite(loss):
            saved = None if manager is None else manager.latest_step()
            kept = f"; the last checkpoint is of step {saved}" if saved else ""
            raise SystemExit(f"step {number}: the loss or an adapter is {loss}, so nothing more is written{kept}")


def train(options: argparse.Namespace) -> None:
    """Trains and writes the adapter; what can be wrong is looked at before the model is loaded."""
    check_folder("--output", options.output, [options.folder])
    config = read_config(options.folder)
    balance_weight(config)
    data, ends = read_data(options, config)
    count, full = len(data["tokens"]), np.mean(data["segments"] > 0)
    steps = options.steps or math.ceil(options.epochs * count / (options.batch_size * options.accumulate))
    if steps >= 2**31:
        raise SystemExit(f"--epochs must be of less than {2**31} steps, got {options.epochs}")
    if options.checkpoints is not None:
        check_folder("--checkpoints", options.checkpoints, [options.folder, options.output])
        check_same_run(options, steps)
    print(f"{count} sequences, {full:.0%} full, for {steps} steps", flush=True)
    model, step_of, state, frozen = prepare(options, config, steps)
    state = run_steps(step_of, state, frozen, data, options, Meter(model), steps)
    nnx.update(model, state[0])
    jgg.models.save_adapter(model, options.output)
    if ends:
        note = json.dumps({"eos_token_id": ends}, indent=2) + "\n"
        (options.output / "generation_config.json").write_text(note, encoding="utf-8")
    print(f"wrote {options.output}")


def main(arguments: list[str] | None = None) -> None:
    options = parse(__doc__, arguments)
    with enough_memory("--batch-size, --sequence-length or --lora-rank, or more of --remat"):
        train(options)


if __name__ == "__main__":
    main()
