"""Reading and writing checkpoint files: names, shapes, dtypes and bytes, and nothing about what they mean."""

from porting.checkpoint.checkpoint import Checkpoint
from porting.checkpoint.config import num_labels
from porting.checkpoint.errors import CheckpointError, HubError
from porting.checkpoint.inspect import Inspection, TensorGroup, inspect_checkpoint
from porting.checkpoint.layout import TensorInfo, WeightFile
from porting.checkpoint.source import open_checkpoint
from porting.checkpoint.write import TensorFile, files_like, write_directory, write_safetensors

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "HubError",
    "Inspection",
    "TensorFile",
    "TensorGroup",
    "TensorInfo",
    "WeightFile",
    "files_like",
    "inspect_checkpoint",
    "num_labels",
    "open_checkpoint",
    "write_directory",
    "write_safetensors",
]
