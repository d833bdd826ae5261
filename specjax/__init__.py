"""Lossless speculative decoding with token trees, in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.checkpoint import load, load_drafts, load_model, save_model
    from specjax.config import ModelConfig
    from specjax.decode import Generation, Step, generate, stream
    from specjax.draft import Drafter, ExpansionDrafter
    from specjax.methods import load_drafter
    from specjax.model import Model
    from specjax.sampling import Sampling
    from specjax.tree import TokenTree, TreeShape

_HOMES = {
    "checkpoint": ("load", "load_drafts", "load_model", "save_model"),
    "config": ("ModelConfig",),
    "decode": ("Generation", "Step", "generate", "stream"),
    "draft": ("Drafter", "ExpansionDrafter"),
    "methods": ("load_drafter",),
    "model": ("Model",),
    "sampling": ("Sampling",),
    "tree": ("TokenTree", "TreeShape"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Drafter",
    "ExpansionDrafter",
    "Generation",
    "Model",
    "ModelConfig",
    "Sampling",
    "Step",
    "TokenTree",
    "TreeShape",
    "generate",
    "load",
    "load_drafter",
    "load_drafts",
    "load_model",
    "save_model",
    "stream",
]


def __getattr__(name: str) -> Any:
    """A public name, from the module it lives in: importing jax waits until something needs it."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'specjax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specjax.{_HOME_OF[name]}"), name)
