"""snnpart: a compiler for spiking neural networks.

    program = snnpart.parallelize(model, tp=2, pp=2)

Names are loaded when they are first used, so that importing a part of the package stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snnpart.api import ParallelProgram, SavedProgram, load, parallelize
    from snnpart.costs import MachineProfile
    from snnpart.errors import SnnpartError
    from snnpart.plan import Plan
    from snnpart.report import Report

__version__ = "0.1.0"
_HOMES = {
    "parallelize": "api",
    "ParallelProgram": "api",
    "Plan": "plan",
    "Report": "report",
    "MachineProfile": "costs",
    "SnnpartError": "errors",
    "load": "api",
    "SavedProgram": "api",
}
__all__ = ["MachineProfile", "ParallelProgram", "Plan", "Report", "SavedProgram", "SnnpartError", "load", "parallelize"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'snnpart' has no attribute '{name}'")
        return getattr(import_module(f"snnpart.{_HOMES[name]}"), name)
