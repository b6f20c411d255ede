"""Continues a prompt with a model of a Hugging Face folder, and prints the text as it comes.

    python examples/generate.py FOLDER "Once upon a time"
    python examples/generate.py FOLDER "Once upon a time" --adapter ADAPTER --temperature 0.7

It shows how to do in your own program what the command `jgg generate` does, which has more options. FOLDER has
config.json, safetensors files and tokenizer.json; ADAPTER is what `jgg finetune` or PEFT wrote.
"""

import argparse
import functools

import jax

import jgg.data
import jgg.models


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("prompt")
    parser.add_argument("--adapter")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(%(default)s: the likeliest token)")
    options = parser.parse_args(arguments)

    tokenizer = jgg.data.load_tokenizer(options.folder)
    prompt, _ = jgg.data.encode(tokenizer, options.prompt)
    stop_tokens = jgg.data.stop_tokens(options.folder, options.adapter)
    model = jgg.models.load(options.folder)
    if options.adapter is not None:
        jgg.models.load_adapter(model, options.adapter)

    stream = jgg.models.stream(
        model,
        [prompt],
        options.max_new_tokens,
        temperature=options.temperature,
        top_p=0.95,
        key=jax.random.key(0),
        stop_tokens=stop_tokens,
    )
    decoder = functools.partial(jgg.data.continuation, tokenizer, prompt)  # the text that new tokens add
    print(options.prompt, end="", flush=True)
    for (piece,) in jgg.models.stream_text(stream, [decoder], stop=["\n\n"], stop_tokens=stop_tokens):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
