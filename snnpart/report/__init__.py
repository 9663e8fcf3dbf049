"""The partition report: what was decided for a program and what it costs, as text, JSON and a page.

`build` reads a `CompiledProgram` and leaves plain frozen data (`Report`); the three forms are made from that data
alone, so that they never disagree.
"""

from snnpart.report.build import build
from snnpart.report.data import Report

__all__ = ["Report", "build"]
