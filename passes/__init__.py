"""The passes in the order they run."""

from __future__ import annotations

from snnpart.pass_manager import Pass
from snnpart.passes.rewrite.canonicalize import Canonicalize

REWRITE: tuple[Pass, ...] = (Canonicalize(),)
