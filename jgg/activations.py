"""The experts' activations: those with kernels, by name, and the type for your own."""

from jgg.core.activations import ACTIVATIONS, Activation, ActivationLike, clamped_swiglu

__all__ = ["ACTIVATIONS", "Activation", "ActivationLike", "clamped_swiglu"]
