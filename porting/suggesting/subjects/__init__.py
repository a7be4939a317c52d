"""The two models that are held against each other, and their weights at work."""

from porting.suggesting.subjects.building import Builder
from porting.suggesting.subjects.subject import Subjects, prepare, sides

__all__ = ["Builder", "Subjects", "prepare", "sides"]
