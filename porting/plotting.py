"""The parts of matplotlib that are used, imported only here, and without ``./matplotlibrc``, which it would read.

A stranger's file there could make it run LaTeX, or wait for ever.  Nor does a value of ``MPLBACKEND`` that matplotlib
does not know end the import: pictures are drawn without a backend.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_backend = "" if "matplotlib" in sys.modules else os.environ.pop("MPLBACKEND", "")
_exists = os.path.exists
os.path.exists = lambda path: path != "matplotlibrc" and _exists(path)  # by this it looks for the file
try:
    import matplotlib as mpl
    from matplotlib import style
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize, PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.font_manager import findfont
    from matplotlib.ft2font import FT2Font
    from matplotlib.image import AxesImage
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
finally:
    os.path.exists = _exists
    if _backend:
        os.environ["MPLBACKEND"] = _backend
if _backend:
    with suppress(ValueError):
        mpl.rcParams["backend"] = _backend

__all__ = [
    "Axes",
    "AxesImage",
    "FT2Font",
    "Figure",
    "FuncFormatter",
    "LinearSegmentedColormap",
    "LogLocator",
    "LogNorm",
    "Normalize",
    "NullLocator",
    "PowerNorm",
    "Rectangle",
    "findfont",
    "mpl",
    "style",
]
