"""A conversation: each line of standard input is answered, with all that was said before."""

import contextlib
import sys
from collections.abc import Iterator

from jgg.cli.errors import one_line, told
from jgg.cli.generation.speaker import Speaker

PROMPT = "> "


def messages_of(system: str | None) -> list[dict[str, str]]:
    """The messages before the first one of a user."""
    return [] if system is None else [{"role": "system", "content": system}]


def talk(speaker: Speaker, system: str | None, chunk: int) -> None:
    """Answers each line until standard input ends. An interrupt ends an answer; what was said of it is kept."""
    messages = messages_of(system)
    with one_line():  # what is wrong is told before the first question
        speaker.ids_of_chat([*messages, {"role": "user", "content": "?"}], "the conversation")
        speaker.load()
    for turn, line in enumerate(_lines()):
        messages.append({"role": "user", "content": line})
        with one_line():
            ids = speaker.ids_of_chat(messages, "the conversation")
            stream = speaker.stream(ids, chunk, is_padded=True, turn=turn)
            pieces = speaker.texts(ids, stream)
        answer = ""
        with contextlib.suppress(KeyboardInterrupt):
            for (new,) in told(pieces):
                answer += new
                print(new, end="", flush=True)
        print(flush=True)
        messages.append({"role": "assistant", "content": answer})


def _lines() -> Iterator[str]:
    """The lines that are not empty; a terminal is asked for each."""
    if sys.stdin is None:
        return
    is_asked = sys.stdin.isatty() and sys.stdout.isatty()
    if is_asked:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # lines can be edited then
    with contextlib.suppress(EOFError):
        while line := (input(PROMPT) + "\n" if is_asked else sys.stdin.readline()):
            if line.strip():
                yield line.removesuffix("\n").removesuffix("\r")
    if is_asked:
        print()
