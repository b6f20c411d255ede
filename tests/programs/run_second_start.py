"""Compiles a training step with JAX's persistent cache in a folder; prints what it found there, as JSON.

Arguments: the folder and an implementation. Prints the cache's hits, the seconds that the step took to be ready, and
a hash of the program lowered for a Hopper GPU, which must not change from one process to the next, though its kernels
are compiled again.
"""

import hashlib
import json
import os
import sys
import time

import jax
import jax.numpy as jnp

import jgg
from tests.support.transforms import ORDER, WITH_EVERYTHING, batch_of, passes_of


def main():
    folder, implementation = sys.argv[1:]
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    events = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    function = passes_of(WITH_EVERYTHING, None if implementation == "None" else implementation)
    batch = batch_of(WITH_EVERYTHING, 1)
    arguments = [batch[name][0] for name in ORDER]
    jax.block_until_ready(jnp.sin(batch["x"]))  # so that the backend's own start is not counted
    events.clear()
    start = time.perf_counter()
    step = jax.jit(function).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    jax.block_until_ready(step(*arguments))
    found = {name: events.count(f"/jax/compilation_cache/cache_{name}") for name in ("hits", "misses")}
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"
    with jgg.target(90):
        program = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    print(json.dumps(found | {"seconds": seconds, "program": hashlib.sha256(program.encode()).hexdigest()}))


if __name__ == "__main__":
    main()
