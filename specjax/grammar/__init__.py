"""Structured output: what texts must match, compiled by llguidance, followed token by token."""

from specjax.grammar.compiling import Grammar, GrammarCompiler, GrammarSource

__all__ = ["Grammar", "GrammarCompiler", "GrammarSource"]
