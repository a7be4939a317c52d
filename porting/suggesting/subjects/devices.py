"""Whether an error comes of data that was moved to a device that is not there, or is not where the rest is."""

from __future__ import annotations

import re

STAY = "keep it where its inputs and weights are: device=x.device"
"""What to do about it."""

_ABOUT = re.compile(
    r"CUDA|NVIDIA|HIP|XPU|(?<![a-z])(cuda|mps|xpu|npu|hpu|tpu)(?![a-z])|accelerator device"
    r"|same device|on the expected device|different devices"
)


def elsewhere(error: BaseException) -> bool:
    """Whether torch complains of a device: one that it lacks here, or two that meet.

    >>> elsewhere(AssertionError("Torch not compiled with CUDA enabled"))
    True
    >>> elsewhere(RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu!"))
    True
    >>> elsewhere(ValueError("a barracuda"))
    False
    """
    return isinstance(error, AssertionError | RuntimeError | TypeError | ValueError) and bool(_ABOUT.search(str(error)))
