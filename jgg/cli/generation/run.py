"""Runs `jgg generate`: one prompt, or a conversation."""

import argparse
import io
import json
import sys

from jgg.cli.errors import UsageError, enough_memory, one_line, told
from jgg.cli.generation.chat import messages_of, talk
from jgg.cli.generation.speaker import Speaker

CHUNK, LARGE_CHUNK = 4, 32  # new tokens at once: for someone who reads them as they come, and else


def run(args: argparse.Namespace) -> int:
    """Prints what the model writes; returns 0."""
    _check(args)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack characters
    with enough_memory("--max-new-tokens, --samples or the prompt"):
        with one_line():
            speaker = Speaker(args)
        if args.chat and args.prompt is None and args.prompt_file is None:
            talk(speaker, args.system, CHUNK)
        else:
            _answer(speaker, args)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises UsageError for options that do not fit together."""
    is_talk = args.chat and args.prompt is None and args.prompt_file is None
    if args.system is not None and not args.chat:
        raise UsageError("--system must be given with --chat, got it alone")
    for option, is_given in (("--json", args.json), ("--speed", args.speed), ("--samples", args.samples > 1)):
        if is_talk and is_given:
            raise UsageError(f"{option} must be given with --prompt or --prompt-file in a --chat, got neither")
    if args.stop is not None and not all(args.stop):
        raise UsageError("--stop must be a text, got ''")


def _answer(speaker: Speaker, args: argparse.Namespace) -> None:
    """Continues one prompt, or answers it by the chat template."""
    with one_line():
        text, where = _prompt(args)
        if args.chat:
            ids = speaker.ids_of_chat([*messages_of(args.system), {"role": "user", "content": text}], where)
        else:
            ids = speaker.ids_of(text, where)
        prints = args.samples == 1 and not args.json
        stream = speaker.stream(ids, CHUNK if prints else LARGE_CHUNK)
        pieces = speaker.texts(ids, stream)
    texts = [""] * args.samples
    for new in told(pieces):
        texts = [text + piece for text, piece in zip(texts, new, strict=True)]
        if prints:
            print(new[0], end="", flush=True)
    if prints:
        print()
    speeds = speaker.speeds(ids) if args.speed else None
    if args.json:
        samples = [
            {
                "text": each,
                "tokens": stream.tokens[row, : stream.lengths[row]].tolist(),
                "finish_reason": "stop" if stream.is_done[row] else "length",
            }
            for row, each in enumerate(texts)
        ]
        document = {"model": args.model, "adapter": speaker.adapter, "prompt": text, "prompt_tokens": len(ids)}
        print(json.dumps(document | {"samples": samples} | ({"speed": speeds} if speeds else {})))
        return
    if not prints:
        for number, each in enumerate(texts, 1):
            print(f"--- {number} of {args.samples}\n{each}")
    if speeds is not None:
        print(_line(speeds), file=sys.stderr)


def _prompt(args: argparse.Namespace) -> tuple[str, str]:
    """The prompt, and what errors call it."""
    if args.prompt is not None:
        return args.prompt, "--prompt"
    if args.prompt_file is not None:
        try:
            content = args.prompt_file.read_bytes()
        except OSError as error:
            got = f"{args.prompt_file}: {error.strerror}"
            raise UsageError(f"--prompt-file must be a file that can be read, got {got}") from error
        return _decoded(content, f"--prompt-file {args.prompt_file}")
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("--prompt, --prompt-file or standard input must give a prompt, got none; or give --chat")
    return _decoded(sys.stdin.buffer.read(), "standard input")


def _decoded(content: bytes, where: str) -> tuple[str, str]:
    """The text of a file without the line break at its end, and the file's name."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} must be UTF-8, got the byte 0x{content[error.start]:02x}") from error
    return text.removesuffix("\n").removesuffix("\r"), where


def _line(speeds: dict[str, float | None]) -> str:
    parts = [f"prefill: {speeds['prefill']:,.0f} tokens/s"]
    if speeds["decode"] is not None:
        parts.append(f"decode: {speeds['decode']:,.1f} tokens/s")
    peak = speeds["peak_bytes"]
    parts.append("peak memory: unknown on this device" if peak is None else f"peak memory: {peak / 2**30:.1f} GiB")
    return ", ".join(parts)
