"""What rules compute: one class for each operation on elements, used by whatever reads, writes or compares tensors."""

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
