"""What a text must match, as it is asked for; no jax, no numpy."""

import json
from collections.abc import Sequence
from typing import Literal, NamedTuple

KINDS = ("json_schema", "regex", "choice", "grammar")
WHITE_SPACE = r" |\r?\n[ \t]{0,40}"
"""Between the parts of JSON: a space, or a line's end and what the next is indented by. A model of
which any amount is allowed may never come to an end of it."""
INSTALL = "structured output needs llguidance, which is not installed: pip install llguidance."


class GrammarSource(NamedTuple):
    """What a text must match, as it is asked for: its kind, one of `KINDS`, and its text.

    That of `choice` is a JSON list of texts.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    text: str


class GrammarsInUseError(RuntimeError):
    """As many large grammars are in use as may be."""


def choice_in_lark(texts: Sequence[str]) -> str:
    """The terminal CHOICE of Lark's, which is one of some texts: as rules they would be limited."""
    return f"CHOICE: {' | '.join(json.dumps(each, ensure_ascii=False) for each in texts)}\n"


def regex_in_lark(pattern: str) -> str:
    """A regular expression between slashes, as Lark has it.

    Raises:
      ValueError: llguidance is not installed.
    """
    try:
        from llguidance import regex_to_lark
    except ImportError as error:
        raise ValueError(INSTALL) from error
    return f"/{regex_to_lark(pattern, '')}/"
