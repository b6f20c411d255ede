"""What the MoE layers of every framework share, as functions of parameters; `import jgg.layers`."""

from jgg.experts.layer import LayerOptions, Metrics, MoELayer, dense_init, expert_init

__all__ = ["LayerOptions", "Metrics", "MoELayer", "dense_init", "expert_init"]
