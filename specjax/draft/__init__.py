"""Drafters: what proposes trees."""

from specjax.draft.best_first import BestFirstDrafter, Growth
from specjax.draft.drafter import Drafter, Step
from specjax.draft.expansion import ExpansionDrafter
from specjax.draft.ngram import NGram

__all__ = ["BestFirstDrafter", "Drafter", "ExpansionDrafter", "Growth", "NGram", "Step"]
