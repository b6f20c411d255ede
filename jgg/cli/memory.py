"""How much of a GPU's memory a command takes."""

import os

SHARE = ".92"  # the rest is for kernels, libraries and NCCL


def take_most() -> None:
    """Has JAX use 92% of a GPU's memory, not 75%, unless the user says how much: a command owns its process.

    JAX reads this when it loads its CUDA plugin, so it must come before anything asks for devices. It takes either name
    and refuses both.
    """
    if not any(map(os.environ.get, ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"))):
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = SHARE
