"""Drafters: what proposes trees."""

from specjax.draft.best_first import BestFirstDrafter, Growth
from specjax.draft.drafter import Drafter, Seen, Step, Wants
from specjax.draft.ngram import NGram
from specjax.draft.static import ExpansionDrafter

__all__ = [
    "BestFirstDrafter",
    "Drafter",
    "ExpansionDrafter",
    "Growth",
    "NGram",
    "Seen",
    "Step",
    "Wants",
]
