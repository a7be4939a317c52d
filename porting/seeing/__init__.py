"""Seeing what a model attends to."""

from porting.seeing.probabilities import Attention, Layer, attention, attention_of

__all__ = ["Attention", "Layer", "attention", "attention_of"]
