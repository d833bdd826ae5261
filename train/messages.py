"""Messages as people send them to a chat model, made from what every Python has.

`python -m train.messages FILE.jsonl --count 2048` writes prompts for `collect.chat=True`, a line
each: functions of the standard library without their bodies, to be completed or explained; its
documentation, to be summarized or asked about; questions, sums and tasks of `train.beginnings`.
"""

import argparse
import ast
import itertools
import json
import pydoc_data.topics
import random
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from train.beginnings import beginnings
from train.config import Corpus
from train.corpus import standard_library

_KINDS = {"complete": 3, "explain": 1, "document": 1, "summarize": 1, "answer": 1, "ask": 3}
"""How many of ten messages are of a kind."""

_ABOUT_CODE = {
    "explain": ("What does this function do?", "Explain this code.", "Find the bugs in this code."),
    "document": ("Write a docstring for this function.", "Write unit tests for this function."),
}
_ABOUT_TEXT = {
    "summarize": ("Summarize: {text}", "Summarize this in one sentence: {text}"),
    "answer": (
        "{text}\n\nWhat is the main point of this text?",
        "Read the passage and list its three most important facts.\n\n{text}",
        "{text}\n\nBased on this text, when would one use it, and why?",
    ),
}
_FEWEST, _MOST = 150, 900
"""Characters of a piece of code or text."""
_LEAST_SAID = 60
"""Characters of what a function says of itself."""


def messages(count: int, seed: int = 0) -> list[str]:
    """`count` messages, all different; the same for equal arguments and an equal Python."""
    drawn = random.Random(seed)
    functions, passages = list(_functions()), list(_passages())
    asked = [text for text in dict.fromkeys(beginnings()) if text[-1] in ".?"]
    for pieces in (functions, passages, asked):
        drawn.shuffle(pieces)
    kinds = [kind for kind, share in _KINDS.items() for _ in range(share)]
    made: dict[str, None] = {}
    pools = {"code": iter(functions), "text": iter(passages), "asked": iter(asked)}
    for kind in itertools.cycle(kinds):
        if len(made) == count or not pools:
            break
        source = "text" if kind in _ABOUT_TEXT else "asked" if kind == "ask" else "code"
        if source not in pools:
            continue
        piece = next(pools[source], None)
        if piece is None:
            del pools[source]
        elif isinstance(piece, tuple):
            made[_about_code(kind, piece, drawn)] = None
        elif kind in _ABOUT_TEXT:
            made[drawn.choice(_ABOUT_TEXT[kind]).format(text=piece)] = None
        else:
            made[piece] = None
    return list(made)


def _about_code(kind: str, piece: tuple[str, str], drawn: random.Random) -> str:
    begun, whole = piece
    if kind == "complete":
        return begun
    return f"{drawn.choice(_ABOUT_CODE[kind])}\n\n```python\n{whole}\n```"


def _functions() -> Iterator[tuple[str, str]]:
    """Documented functions of the standard library: up to the end of their docstring, and whole."""
    for document in standard_library(Corpus()):
        if document.is_test:
            continue
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError):
            continue
        lines = document.text.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            if len(ast.get_docstring(node) or "") < _LEAST_SAID or len(node.body) == 1:
                continue
            first, said, last = node.lineno - 1, node.body[0].end_lineno, node.end_lineno
            assert said is not None
            assert last is not None
            begun, whole = (
                textwrap.dedent("\n".join(lines[first:end])) + "\n" for end in (said, last)
            )
            if _FEWEST <= len(whole) <= _MOST:
                yield begun, whole.rstrip()


def _passages() -> Iterator[str]:
    """Paragraphs of Python's documentation, one or several together."""
    for text in pydoc_data.topics.topics.values():
        held: list[str] = []
        for paragraph in text.split("\n\n"):
            if "::" in paragraph or "**" in paragraph or paragraph.startswith(" "):
                continue
            if ". " not in paragraph:  # no prose
                continue
            held.append(" ".join(paragraph.split()))
            whole = "\n\n".join(held)
            if len(whole) >= _FEWEST:
                held = []
                if len(whole) <= _MOST:
                    yield whole


def main(arguments: list[str] | None = None) -> int:
    """Write messages as lines."""
    parser = argparse.ArgumentParser(prog="python -m train.messages", description=main.__doc__)
    parser.add_argument("file", help="where they go, a line each")
    parser.add_argument("--count", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    made = messages(options.count, options.seed)
    lines = (json.dumps({"prompt": text}) for text in made)
    Path(options.file).write_text("".join(f"{line}\n" for line in lines))
    if len(made) < options.count:
        print(
            f"train.messages: there are {len(made)} messages, {options.count} were asked for.",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
