"""One of two processes of two CPU devices each, with the experts split over the processes.

Usage: run_two_processes.py PROCESS PORT
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import jax

NAME = "overloaded device with an even share of room, ragged_all_to_all"


def main():
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{sys.argv[2]}", num_processes=2, process_id=int(sys.argv[1]))
    assert (jax.device_count(), jax.local_device_count()) == (4, 2)

    from tests.support.sharded_cases import assert_case_is_right

    mesh = jax.make_mesh((1, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    assert_case_is_right(NAME, mesh)
    print("all right", flush=True)


if __name__ == "__main__":
    main()
