"""What the MoE layers of every framework share, as functions of parameters; `import jgg.layers`."""

from jgg.experts.layer import Metrics, MoELayer
from jgg.experts.layer_options import LayerOptions
from jgg.experts.layer_parameters import dense_init, expert_init

__all__ = ["LayerOptions", "Metrics", "MoELayer", "dense_init", "expert_init"]
