"""Experts, their features and tokens split over the devices of a mesh; `import jgg.sharding`."""

from jgg.experts.mesh import MoESharding
from jgg.experts.sharding import interleave, moe_mlp_on_device, sharded_moe_mlp

__all__ = ["MoESharding", "interleave", "moe_mlp_on_device", "sharded_moe_mlp"]
