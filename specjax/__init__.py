"""Lossless speculative decoding with token trees, in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.base.sampling import Sampling
    from specjax.checkpoints.huggingface import save_model, save_sharded
    from specjax.checkpoints.load import load, load_drafts, load_model
    from specjax.checkpoints.pair import Pair, load_pair
    from specjax.decoding.conversation import Conversation
    from specjax.decoding.generate import Generation, Step, generate, stream
    from specjax.draft import Drafter, ExpansionDrafter
    from specjax.engine.engine import Engine
    from specjax.engine.request import EngineClosedError, QueueFullError, Request, RequestError
    from specjax.grammar.compiling import Grammar, GrammarCompiler
    from specjax.methods.method import Method, Setting, register_method
    from specjax.methods.registry import build, load_drafter, setting_of
    from specjax.models.config import ModelConfig
    from specjax.models.transformer import Model
    from specjax.parallel.mesh import make_mesh
    from specjax.trees.tree import TokenTree, TreeShape
    from specjax.verify.rules import Rule, register_rule

_HOMES = {
    "checkpoints.huggingface": ("save_model", "save_sharded"),
    "checkpoints.load": ("load", "load_drafts", "load_model"),
    "models.config": ("ModelConfig",),
    "decoding.conversation": ("Conversation",),
    "decoding.generate": ("Generation", "Step", "generate", "stream"),
    "draft": ("Drafter", "ExpansionDrafter"),
    "engine.engine": ("Engine",),
    "engine.request": ("EngineClosedError", "QueueFullError", "Request", "RequestError"),
    "grammar.compiling": ("Grammar", "GrammarCompiler"),
    "methods.registry": ("build", "load_drafter", "setting_of"),
    "models.transformer": ("Model",),
    "checkpoints.pair": ("Pair", "load_pair"),
    "base.sampling": ("Sampling",),
    "methods.method": ("Method", "Setting", "register_method"),
    "parallel.mesh": ("make_mesh",),
    "trees.tree": ("TokenTree", "TreeShape"),
    "verify.rules": ("Rule", "register_rule"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Conversation",
    "Drafter",
    "Engine",
    "EngineClosedError",
    "ExpansionDrafter",
    "Generation",
    "Grammar",
    "GrammarCompiler",
    "Method",
    "Model",
    "ModelConfig",
    "Pair",
    "QueueFullError",
    "Request",
    "RequestError",
    "Rule",
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
    "register_method",
    "register_rule",
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
