"""The two models that are held against each other, and their weights at work."""

from porting.suggesting.subjects.building import Builder
from porting.suggesting.subjects.model_pair import ModelPair, prepare, traced_models

__all__ = ["Builder", "ModelPair", "prepare", "traced_models"]
