"""Seeing what a model attends to."""

from porting.seeing.probabilities import Attention, attention, attention_of
from porting.seeing.shares import Layer

__all__ = ["Attention", "Layer", "attention", "attention_of"]
