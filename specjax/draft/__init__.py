"""Drafters: what proposes trees."""

from specjax.draft.drafter import Drafter
from specjax.draft.expansion import ExpansionDrafter

__all__ = ["Drafter", "ExpansionDrafter"]
