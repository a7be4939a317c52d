"""The operations of rules on elements, one class for each, used by all that read, write or compare tensors."""

from porting.ops.contents import Content
from porting.ops.exactness import InexactError, require_held, wide_dtype, widen
from porting.ops.formula import Formula, FormulaError
from porting.ops.operations import CONSTANTS, NOTHING, Arithmetic, Constant, Offset, Operation, Scale, Sum

__all__ = [
    "CONSTANTS",
    "NOTHING",
    "Arithmetic",
    "Constant",
    "Content",
    "Formula",
    "FormulaError",
    "InexactError",
    "Offset",
    "Operation",
    "Scale",
    "Sum",
    "require_held",
    "wide_dtype",
    "widen",
]
