"""The passes in the order they run."""

from __future__ import annotations

from snnpart.pass_manager import Pass
from snnpart.passes.analyze.cost import AnalyzeCost
from snnpart.passes.analyze.domain import AnalyzeDomain
from snnpart.passes.analyze.repeats import AnalyzeRepeats
from snnpart.passes.analyze.state import AnalyzeState
from snnpart.passes.analyze.time import AnalyzeTime
from snnpart.passes.rewrite.canonicalize import Canonicalize
from snnpart.passes.rewrite.fold_time import FoldTime
from snnpart.passes.rewrite.hoist_invariant import HoistInvariant
from snnpart.passes.rewrite.merge_views import MergeViews
from snnpart.passes.rewrite.stack_places import StackPlaces

REWRITE: tuple[Pass, ...] = (Canonicalize(), StackPlaces(), FoldTime(), HoistInvariant(), MergeViews())
ANALYZE: tuple[Pass, ...] = (AnalyzeState(), AnalyzeTime(), AnalyzeDomain(), AnalyzeCost(), AnalyzeRepeats())
