"""The trials of a port beyond its probes: inputs of every kind, ways of calling it, and its outputs.

:mod:`~porting.trials.scope` is the result as data; :mod:`~porting.trials.battery` makes the batches,
:mod:`~porting.trials.purity` calls the port in every way, :mod:`~porting.trials.returned` pairs outputs, and
:mod:`~porting.trials.explore` runs it all.
"""

from porting.trials.scope import Impurity, Kind, NotRun, Result, Returned, Scope, Status

__all__ = ["Impurity", "Kind", "NotRun", "Result", "Returned", "Scope", "Status"]
