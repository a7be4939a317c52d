"""The two models that are compared, and a trace of their weights in use."""

from porting.suggesting.subjects.building import Builder
from porting.suggesting.subjects.model_pair import ModelPair, prepare, traced_models

__all__ = ["Builder", "ModelPair", "prepare", "traced_models"]
