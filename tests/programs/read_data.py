"""Prints by how many bytes the memory of a process grows that makes batches of a file, without pages of files.

    python -m tests.programs.read_data FOLDER DATA

FOLDER has tokenizer.json.
"""

import re
import sys
from pathlib import Path

import jgg.data


def memory():
    """The bytes of memory that no file has."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))


def main(folder, data):
    tokenizer = jgg.data.load_tokenizer(folder)

    def make(path, count):
        batches = jgg.data.batches(path, tokenizer, length=1024, batch_size=4)
        grown = []
        for n in range(count):
            batches[n]
            grown.append(memory())
        return batches, max(grown)

    small = Path(data).with_suffix(".small")
    with open(data, "rb") as file:
        small.write_bytes(b"".join(next(file) for _ in range(2000)))
    _, before = make(small, 10)  # threads and modules are there
    batches, after = make(data, 100)
    print(after - before, batches.num_examples, 4 * int(batches.num_learned))


if __name__ == "__main__":
    main(*sys.argv[1:])
