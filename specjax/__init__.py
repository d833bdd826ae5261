"""Lossless speculative decoding with token trees, in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.checkpoint import load, load_drafts, load_model, save_model, save_sharded
    from specjax.config import ModelConfig
    from specjax.decode import Generation, Step, generate, stream
    from specjax.draft import Drafter, ExpansionDrafter
    from specjax.methods import build, load_drafter, setting_of
    from specjax.model import Model
    from specjax.pair import Pair, load_pair
    from specjax.sampling import Sampling
    from specjax.setting import Setting
    from specjax.sharding import make_mesh
    from specjax.tree import TokenTree, TreeShape

_HOMES = {
    "checkpoint": ("load", "load_drafts", "load_model", "save_model", "save_sharded"),
    "config": ("ModelConfig",),
    "decode": ("Generation", "Step", "generate", "stream"),
    "draft": ("Drafter", "ExpansionDrafter"),
    "methods": ("build", "load_drafter", "setting_of"),
    "model": ("Model",),
    "pair": ("Pair", "load_pair"),
    "sampling": ("Sampling",),
    "setting": ("Setting",),
    "sharding": ("make_mesh",),
    "tree": ("TokenTree", "TreeShape"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Drafter",
    "ExpansionDrafter",
    "Generation",
    "Model",
    "ModelConfig",
    "Pair",
    "Sampling",
    "Setting",
    "Step",
    "TokenTree",
    "TreeShape",
    "build",
    "generate",
    "load",
    "load_drafter",
    "load_drafts",
    "load_model",
    "load_pair",
    "make_mesh",
    "save_model",
    "save_sharded",
    "setting_of",
    "stream",
]


def __getattr__(name: str) -> Any:
    """A public name, from the module it lives in: importing jax waits until something needs it."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'specjax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specjax.{_HOME_OF[name]}"), name)
