"""Which module and which line of the user's code is running now."""

from __future__ import annotations

import linecache
import os
import sys
from types import FrameType, TracebackType

import torch

from snnpart.facts import Origin

_INSIDE = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))
_SESSION = os.path.join(os.path.dirname(__file__), "session.py")
_known: dict[str, bool] = {}


def _is_users(file: str) -> bool:
    """Whether code in this file is neither torch's nor snnpart's."""
    known = _known.get(file)
    if known is None:
        known = _known[file] = not file.startswith((*_INSIDE, "<frozen", "<snnpart"))
    return known


def users_frame() -> FrameType | None:
    """The innermost frame of the forward that is neither torch's nor snnpart's; None in one made of torch's modules."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename == _SESSION:
            return None
        frame = frame.f_back
    return frame


def here(module: str) -> Origin:
    """The origin of a node made now in `module`."""
    frame = users_frame()
    return Origin(module) if frame is None else Origin(module, frame.f_code.co_filename, frame.f_lineno)


def raised_at(module: str, trace: TracebackType | None) -> Origin:
    """The origin of an error: the innermost line of the user's in its traceback."""
    origin = Origin(module)
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if _is_users(file):
            origin = Origin(module, file, trace.tb_lineno)
        trace = trace.tb_next
    return origin


def describe(origin: Origin) -> str:
    """`module 'path', file:line: source text`, for messages."""
    text = linecache.getline(origin.file, origin.line).strip() if origin.file else ""
    return origin.place + (f": {text}" if text else "")
