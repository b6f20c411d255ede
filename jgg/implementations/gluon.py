"""What Gluon kernels need from jax-triton beyond plain Triton's: layouts of descriptors."""

from triton.experimental.gluon import language
from triton.experimental.gluon.language import NVMMASharedLayout

from jgg.products.launch import Tma


def shared_layout(tma: Tma, dtype) -> NVMMASharedLayout:
    """The layout in shared memory of a descriptor's blocks, in a cluster of two."""
    axes = [int(axis == tma.cta_axis) for axis in range(len(tma.block_shape))]
    return NVMMASharedLayout.get_default_for(list(tma.block_shape), getattr(language, dtype.name), cga_layout=[axes])
