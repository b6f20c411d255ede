"""Optimizers of optax for stacks of matrices: Muon, and the orthogonalization that it is made of."""

from jgg.optim.muon import MuonState, muon
from jgg.optim.newton_schulz import orthogonalize
from jgg.optim.parameters import matrices
from jgg.optim.qk_clip import qk_clip

__all__ = ["MuonState", "matrices", "muon", "orthogonalize", "qk_clip"]
