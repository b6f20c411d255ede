"""optax optimizers for stacks of matrices: Muon, and the orthogonalization it is built on."""

from jgg.optim.clipping import qk_clip
from jgg.optim.newton_schulz import orthogonalize
from jgg.optim.optimizer import MuonState, muon
from jgg.optim.parameters import matrices

__all__ = ["MuonState", "matrices", "muon", "orthogonalize", "qk_clip"]
