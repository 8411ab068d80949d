"""The engine: a library for pipeline parallelism over a sequence of layers.

Imports torch and the standard library only; knows no image, label, epoch, configuration or command line.
"""

from .engine import Pipeline, StepResult
from .layers import LayerFactory, Layers
from .partition import cut
from .schedule import (
    POLICIES,
    REMAT_MODES,
    Operation,
    OperationKind,
    Schedule,
    ScheduleError,
    make_schedule,
    validate_schedule,
)
from .transport import ProcessGroups, make_process_groups

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
