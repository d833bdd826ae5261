"""Messages as people send them to a chat model, made from what every Python has.

`python -m train.messages FILE.jsonl --count 2048` writes prompts for `collect.chat=True`, a line
each: functions of the standard library without their bodies, to be completed or explained; its
documentation, to be summarized or asked about; sums, sentences to be translated, and questions and
tasks of `train.beginnings`.
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
from typing import Any

from train.beginnings import WORDS, beginnings, drawn_from
from train.config import Corpus
from train.corpus import standard_library

_KINDS = {
    "complete": 4, "begin": 3, "explain": 1, "document": 1, "summarize": 2, "answer": 2, "ask": 4,
    "solve": 2, "translate": 1,
}  # fmt: skip
"""How many of twenty messages are of a kind."""

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
_WORDS = {
    "name": f"{WORDS['name']}|Lea",
    "thing": WORDS["thing"],
    "who": """
        Die Regierung|Der Präsident|Ein Sprecher der Polizei|Die Universität|Das Unternehmen
        Der Trainer|Die Stadt|Eine junge Ärztin|Der Minister|Die Gewerkschaft|Mein Bruder
        """,
    "what": """
        einen neuen Bahnhof|die Kosten der Reise|das alte Haus|eine Lösung für das Problem
        den Vertrag|mehr als {number} Millionen Euro|die Ergebnisse der Studie|ein altes Buch
        """,
    "where": """
        in Berlin|an der Grenze|im Norden des Landes|auf dem Markt|in der Schweiz|am Montag
        seit dem Sommer|in den letzten Jahren|vor der Wahl|wegen des Wetters|nach dem Spiel
        """,
    "done": """
        gesehen|bezahlt|verkauft|vergessen|gefunden|geplant|kritisiert|vorgestellt|verloren
        """,
    "why": """
        weil es zu teuer war|obwohl viele Menschen dagegen sind|damit die Kinder sicher sind
        bevor der Winter kommt|da niemand mehr daran glaubte|wie die Zeitung berichtet
        """,
    "called": """
        process|solve|select|check|collect|transform|find_all|count_items|rearrange|compute
        """,
    "takes": """
        numbers: list[int]|words: list[str]|text: str|n: int|a: int, b: int|grid: list[list[int]]
        values: List[float]|s: str, k: int|xs, ys|items: dict[str, int]
        """,
    "gives": "int|str|bool|list[int]|List[str]|float|tuple[int, int]|dict[str, int]",
    "do": """
        Return the sum of|Count|Return the largest of|Return a list of|Find the first of|Check
        Return the product of|Remove|Replace by zero|Return the average of|Return the number of
        """,
    "of": """
        the numbers|the words|the even numbers|the digits|the prime numbers|the characters|the pairs
        the substrings|the positive integers|the vowels|the rows|the divisors|the elements
        """,
    "that": """
        that are greater than the first one|that occur more than once|whose length is odd
        in reverse order|at even positions|between the smallest and the largest|without duplicates
        that begin with a vowel|sorted by the sum of their digits|that are palindromes|up to n
        that add up to zero|divisible by three or five|that are not in the second list
        """,
    "else": """
        If there is none, return None.|Ignore case.|The input may be empty.|Do not use sorted().
        Raise ValueError if an argument is negative.|Ties go to the one that comes first.
        """,
}
_BEGUN = """
    def {called}({takes}) -> {gives}:\\n    \"\"\"{do} {of} {that}.\\n    {else}\\n    \"\"\"\\n
    def {called}({takes}):\\n    '''{do} {of} {that}. {else} '''\\n
    Write a Python function `{called}({takes})`. {do} {of} {that}. {else}
"""
_SOLVE = """
    {name} has {number} {thing}. {name} has {number} more. How many {thing} do they have together?
    {name} buys {number} {thing} for ${number} each and pays with $9000. What is the change?
    A shop sells {thing} at ${number} a dozen. How much do {number} dozens cost?
    {name} reads {number} pages a day. How many pages does {name} read in {number} days?
    A train travels at {number} km per hour. How far does it go in {number} minutes?
    A shelf has {number} boxes of {number} {thing} each. {number} are bad. How many are good?
    {name} earns ${number} an hour and works {number} hours a week. What is that in 4 weeks?
    A rectangle is {number} cm long and {number} cm wide. What are its area and its perimeter?
    {name} is {number} years old, and {name} is twice as old. How old are both in {number} years?
    Each of {number} children gets 12 {thing}. How many are left of 2000, and if 3 children leave?
    What is {number}% of {number}?|Solve for x: {number}x + {number} = {number}.
    {name} saves ${number} a week for {number} weeks and spends half of it. How much is left?
    Half of the {number} {thing} on a table are red, a third are blue. How many are neither?
    A bag holds {number} red and {number} blue marbles. How likely is a red one?
"""
_TRANSLATE = """
    Translate German to English: {who} hat {what} {where} {done}.
    Translate German to English: {who} hat {what} {done}, {why}.
    Translate German to English: {where} hatte {who} {what} noch nicht {done}, {why}.
    Translate German to English: {who} sagte, dass {name} {what} {where} {done} hat.
    Translate the following sentence into English: {who} wird {what} nicht {done} haben, {why}.
"""
_FEWEST, _MOST = 150, 900
"""Characters of a piece of code or text."""
_LEAST_SAID = 60
"""Characters of what a function says of itself."""


def messages(count: int, seed: int = 0) -> list[str]:
    """`count` messages, all different; the same for equal arguments and an equal Python."""
    drawn = random.Random(seed)
    pools: dict[str, list[Any]] = {"code": list(_functions()), "text": list(_passages())}
    pools["ask"] = [text for text in dict.fromkeys(beginnings(4 * count)) if text[-1] in ".?"]
    for pieces in pools.values():
        drawn.shuffle(pieces)
    for kind, texts in (("begin", _BEGUN), ("solve", _SOLVE), ("translate", _TRANSLATE)):
        pools[kind] = list(dict.fromkeys(drawn_from(texts, _WORDS, count)))
    left = {kind: iter(pieces) for kind, pieces in pools.items()}
    kinds = [kind for kind, share in _KINDS.items() for _ in range(share)]
    made: dict[str, None] = {}
    for kind in itertools.cycle(kinds):
        if len(made) == count or not left:
            break
        source = "text" if kind in _ABOUT_TEXT else kind if kind in pools else "code"
        if source not in left:
            continue
        piece = next(left[source], None)
        if piece is None:
            del left[source]
        elif source == "code":
            made[_about_code(kind, piece, drawn)] = None
        elif source == "text":
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
