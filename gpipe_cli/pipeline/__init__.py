"""The engine: a library for pipeline parallelism over a sequence of layers.

Imports torch and the standard library only; knows no image, label, epoch, configuration or command line.
"""

from .engine import Pipeline, StepResult
from .layers import LayerFactory, Layers
from .partition import cut
from .policies import POLICIES, REMAT_MODES, make_schedule
from .schedule import Operation, OperationKind, Schedule
from .transport import ProcessGroups, make_process_groups
from .validation import ScheduleError, validate_schedule

__all__ = [
    "POLICIES",
    "REMAT_MODES",
    "LayerFactory",
    "Layers",
    "Operation",
    "OperationKind",
    "Pipeline",
    "ProcessGroups",
    "Schedule",
    "ScheduleError",
    "StepResult",
    "cut",
    "make_process_groups",
    "make_schedule",
    "validate_schedule",
]
