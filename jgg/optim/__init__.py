"""optax optimizers for stacks of matrices: Muon, the orthogonalization it is built on, and states in 8 bits."""

from jgg.optim.clipping import qk_clip
from jgg.optim.newton_schulz import orthogonalize
from jgg.optim.optimizer import MuonState, muon
from jgg.optim.parameters import matrices
from jgg.optim.small_states import EightBitState, states_in_8_bits

__all__ = [
    "EightBitState",
    "MuonState",
    "matrices",
    "muon",
    "orthogonalize",
    "qk_clip",
    "states_in_8_bits",
]
