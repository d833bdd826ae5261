"""Methods as data: what each needs, how it is built, and which one is the fastest here.

Whoever imports any of this finds the methods registered.
"""

from specjax.methods import builtin
from specjax.methods.method import METHODS

__all__ = ["METHODS", "builtin"]
