"""Fine-tunes a model from a Hugging Face folder with LoRA, on one device, and writes an adapter that PEFT loads.

    python examples/finetune.py FOLDER --data train.jsonl --output adapter --checkpoints run1
    python examples/generate.py FOLDER adapter --prompt "Once upon a time"

FOLDER has config.json, safetensors files and tokenizer.json. Each line of the data is a JSON object:

    {"prompt": "...", "completion": "..."}    learns the completion and the token that ends a text
    {"text": "..."}                           learns all of it
    {"messages": [{"role": ..., "content": ...}, ...]}    learns the last message alone, which is the assistant's

Messages are written by the folder's chat template, which needs `pip install jinja2`; all else is taken as it is. With
--checkpoints, the same command run again goes on from the last checkpoint.

Examples are packed into sequences and attend to themselves alone; the positions that are left at the end of a sequence
are one more segment, which counts in the routers' balancing loss alone. Attention is then computed for all pairs of
tokens, and masked. With --no-packing each sequence has one example and attention is causal, whose masked half cuDNN's
kernel skips: better for long examples.

MFU is the FLOPs that LoRA needs over what the GPU could do at most in bfloat16. For each token of an example, and each
parameter of a matrix that acts on it (top-k of the experts), they are 2 for the forward pass and 2 for the gradient of
x; adapters need 2 more for their own gradient; attention needs 12 for each feature of the heads and each token attended
to. What rematerialization repeats does not count. Needs `pip install '.[flax,hf]' tokenizers`.
"""

import argparse
import bisect
import functools
import json
import math
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

import jgg
import jgg.models

try:
    from tokenizers import Tokenizer
except ImportError as error:
    raise SystemExit("examples/finetune.py needs tokenizers: pip install tokenizers") from error

EXPERTS = {"bfloat16": "dense", "as-stored": "as stored", "fp8": jgg.Fp8()}
PEAK_FLOPS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12}  # dense bfloat16, by the beginning of a device's name
TARGETS = ("w_q", "w_k", "w_v", "w_o", "w_gate_up", "w_down", "w_dense_gate_up", "w_dense_down")
OTHER_TARGETS = ("w_shared_gate_up", "w_shared_down", "w_router")


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def chat_template(folder: Path):
    """The function that writes messages as a text, by the folder's chat template."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # templates are code of the folder's author

    settings, path = read_json(folder / "tokenizer_config.json"), folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.exists() else settings.get("chat_template")
    if not isinstance(source, str):
        raise SystemExit(f'rows with "messages" need chat_template.jinja in {folder}, or one in tokenizer_config.json')

    def fail(message):
        raise SystemExit(f"the chat template of {folder} says: {message}")

    loops = ["jinja2.ext.loopcontrols"]  # these options and names are those that transformers gives to templates
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=loops)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    tokens = {name: settings.get(name) or "" for name in ("bos_token", "eos_token")}
    names = {name: token if isinstance(token, str) else token["content"] for name, token in tokens.items()}
    names |= {"raise_exception": fail, "strftime_now": time.strftime}
    return functools.partial(environment.from_string(source, names).render)


def read_examples(options: argparse.Namespace) -> list[tuple[np.ndarray, int]]:
    """The tokens of each line of the data, and the number of the first of them that is learned."""
    folder, examples, num_cut = options.folder, [], 0
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [read_json(folder / name).get("eos_token_id") for name in ("config.json", "generation_config.json")]
    end = np.ravel([found for found in ends if found is not None][:1])[:1].astype(int).tolist()
    render = functools.cache(lambda: chat_template(folder))

    def encode(text: str, is_start: bool = False) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=is_start).ids

    # split("\n"): a string of JSON may hold what splitlines takes for the end of a line
    for number, line in enumerate(options.data.read_text(encoding="utf-8").rstrip().split("\n"), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise SystemExit(f"{options.data}:{number} must be a JSON object, got {line[:80]}: {error}") from error
        match row:
            case {"prompt": str(prompt), "completion": str(completion)}:
                context, learned = encode(prompt, True), encode(completion) + end
            case {"text": str(text)}:
                context, learned = [], encode(text, True) + end
            case {"messages": [*earlier, {"role": "assistant"} as last]}:
                prompt = render()(messages=earlier, add_generation_prompt=True)
                text = render()(messages=[*earlier, last], add_generation_prompt=False)
                if not text.startswith(prompt):
                    raise SystemExit(f"{options.data}:{number}: the template writes the messages before the last anew")
                context, learned = encode(prompt), encode(text.removeprefix(prompt))
            case _:
                keys = '"prompt" and "completion", "text", or "messages" that end with the assistant\'s'
                raise SystemExit(f"{options.data}:{number} must have {keys}, got {line[:80]}")
        num_cut += len(context) + len(learned) > options.sequence_length + 1
        ids = np.array((context + learned)[: options.sequence_length + 1], np.int32)
        if len(ids) > max(len(context), 1):  # else nothing to learn is left of it
            examples.append((ids, len(context)))
    if not examples:
        raise SystemExit(f"{options.data} must have an example with tokens to learn, got none")
    print(f"{len(examples)} examples, {num_cut} cut to --sequence-length, or left out where nothing to learn is left")
    return examples


def pack(examples: list[tuple[np.ndarray, int]], length: int, is_packed: bool) -> dict[str, np.ndarray]:
    """Packs examples: tokens, targets, learned (whether a target is) and segments, 0 for padding; each [N, length]."""
    rows: list[list[tuple[np.ndarray, int]]] = []
    rooms: list[tuple[int, int]] = []  # the room that is left in a sequence and its number, sorted
    # the longest first, each into the fullest sequence that has room
    for example in sorted(examples, key=lambda example: -len(example[0])):
        size = len(example[0]) - 1
        place = bisect.bisect_left(rooms, (size, 0))
        if place == len(rooms):
            room, row = length, len(rows)
            rows.append([])
        else:
            room, row = rooms.pop(place)
        rows[row].append(example)
        if is_packed:
            bisect.insort(rooms, (room - size, row))
    names = {"tokens": np.int32, "targets": np.int32, "learned": np.float32, "segments": np.int32}
    data = {name: np.zeros((len(rows), length), dtype) for name, dtype in names.items()}
    for row, own in enumerate(rows):
        start = 0
        for segment, (ids, first) in enumerate(own, 1):
            end = start + len(ids) - 1
            data["tokens"][row, start:end], data["targets"][row, start:end] = ids[:-1], ids[1:]
            data["learned"][row, max(start + first - 1, start) : end] = 1
            data["segments"][row, start:end] = segment
            start = end
    return data


def batch_of(data: dict[str, np.ndarray], step: int, options: argparse.Namespace) -> dict[str, np.ndarray]:
    """The batch of a step, [accumulate, batch size, length]: each epoch has all sequences in an order of its own."""
    shape, count = (options.accumulate, options.batch_size), len(data["tokens"])
    epochs, places = np.divmod((step - 1) * math.prod(shape) + np.arange(math.prod(shape)), count)
    orders = {epoch: np.random.default_rng((options.seed, epoch)).permutation(count) for epoch in set(epochs.tolist())}
    rows = [orders[epoch][place] for epoch, place in zip(epochs.tolist(), places, strict=True)]
    return {name: array[rows].reshape(*shape, -1) for name, array in data.items()}


def make_step(graphdef, optimizer, balance_weight: float, is_packed: bool):
    """The jitted step: ((adapters, opt_state), frozen, batch) -> ((adapters, opt_state), loss)."""

    def loss_of(adapters, frozen, part, num_learned, num_parts):
        model = nnx.merge(graphdef, adapters, frozen)
        segments = part["segments"] if is_packed else None  # causal attention never sees what follows an example
        losses, sown = nnx.capture(model.losses, nnx.Intermediate)(part["tokens"], part["targets"], segments)
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
        return (optax.apply_updates(adapters, updates), opt_state), loss

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


def prepare(options: argparse.Namespace, steps: int):
    """The model, the function that makes a step, and what it takes: (adapters, opt_state) and the frozen parameters."""
    model = jgg.models.load(
        options.folder, experts=EXPERTS[options.experts], remat=options.remat, lora_rank=options.lora_rank,
        lora_alpha=options.lora_alpha, lora_targets=tuple(options.targets), rngs=nnx.Rngs(options.seed),
    )  # fmt: skip
    graphdef, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)
    rate, warmup = options.learning_rate, max(1, steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(rate / warmup, rate, warmup, max(steps, warmup + 1))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0))
    # the loss of transformers, which the coefficient is for, is topk times that of jgg
    balance_weight = model.config.hf.get("router_aux_loss_coef", 0.0) * model.config.moe.topk
    step_of = make_step(graphdef, optimizer, balance_weight, options.packing)
    return model, step_of, (adapters, optimizer.init(adapters)), frozen


def train(options: argparse.Namespace) -> None:
    """Trains, prints progress, and writes checkpoints and the adapter."""
    data = pack(read_examples(options), options.sequence_length, options.packing)
    count, full = len(data["tokens"]), np.mean(data["segments"] > 0)
    steps = options.steps or math.ceil(options.epochs * count / (options.batch_size * options.accumulate))
    print(f"{count} sequences, {full:.0%} full, for {steps} steps", flush=True)
    model, step_of, state, frozen = prepare(options, steps)
    manager, first = None, 0
    if options.checkpoints is not None:
        keep = ocp.CheckpointManagerOptions(max_to_keep=2)
        manager = ocp.CheckpointManager(options.checkpoints.absolute(), options=keep)
        first = manager.latest_step() or 0
        if first:
            abstract = ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
            state = manager.restore(first, args=abstract)
    step_of = step_of.lower(state, frozen, batch_of(data, 1, options)).compile()
    columns, console = (*Progress.get_default_columns(), MofNCompleteColumn()), Console(stderr=True)
    # no automatic refresh: its thread would disturb what is timed
    with Progress(*columns, console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty()) as bar:
        task, meter = bar.add_task("training", total=steps, completed=first), Meter(model)
        for step in range(first + 1, steps + 1):
            batch = batch_of(data, step, options)
            state, loss = step_of(state, frozen, batch)
            meter.add(batch["segments"])
            if step % options.log_every == 0 or step in (first + 1, steps):
                print(f"step {step}: loss {float(loss):.4f}, {meter}", flush=True)  # waits for the loss first
                meter.restart()
                bar.update(task, completed=step, refresh=True)
            if manager is not None and (step % options.save_every == 0 or step == steps):
                manager.save(step, args=ocp.args.StandardSave(state))  # in the background
    if manager is not None:
        manager.close()  # once all is written
    nnx.update(model, state[0])
    jgg.models.save_adapter(model, options.output)
    print(f"wrote {options.output}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the model's folder")
    parser.add_argument("--data", type=Path, required=True, help="the JSONL file")
    parser.add_argument("--output", type=Path, required=True, help="the adapter's folder")
    parser.add_argument("--lora-rank", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--lora-alpha", type=float, default=32.0, help="(%(default)s)")
    parser.add_argument(
        "--targets", nargs="+", choices=(*TARGETS, *OTHER_TARGETS), default=TARGETS,
        help="matrices with adapters (all but those of shared experts and routers)",
    )  # fmt: skip
    parser.add_argument("--experts", choices=EXPERTS, default="bfloat16", help="their dtype (%(default)s)")
    parser.add_argument("--sequence-length", type=int, default=2048, help="longer examples are cut (%(default)s)")
    parser.add_argument("--packing", action=argparse.BooleanOptionalAction, default=True, help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences at once (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=1, help="such batches in a step (%(default)s)")
    parser.add_argument("--epochs", type=float, default=1.0, help="(%(default)s)")
    parser.add_argument("--steps", type=int, help="in the place of --epochs")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="after the warm-up (%(default)s)")
    parser.add_argument("--remat", choices=("none", "names", "all"), default="names", help="(%(default)s)")
    parser.add_argument("--checkpoints", type=Path, help="a folder to save in and to go on from")
    parser.add_argument("--save-every", type=int, default=200, help="steps (%(default)s)")
    parser.add_argument("--log-every", type=int, default=10, help="steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of new adapters and of the order (%(default)s)")
    train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
