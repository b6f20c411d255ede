"""The activations of experts: those with kernels, by name, and the type of your own."""

from jgg.core.activations import ACTIVATIONS, Activation, ActivationLike, clamped_swiglu

__all__ = ["ACTIVATIONS", "Activation", "ActivationLike", "clamped_swiglu"]
