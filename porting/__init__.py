"""Load pretrained weights into transformers of your own, and prove that the port is faithful."""

from porting.export import Exported, export
from porting.load import load
from porting.provenance import provenance

__all__ = ["Exported", "export", "load", "provenance"]
