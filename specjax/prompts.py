"""Prompts to measure on: a file of lines, or the ones that come with the package."""

import importlib.resources
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Prompt(NamedTuple):
    """A prompt's name and its tokens."""

    name: str
    tokens: list[int]


def read(file: str | None) -> list[tuple[str, str]]:
    """Names and texts of a file's prompts, of the bundled ones without a file.

    A line is `{"id", "prompt"}`, or `{"id", "turns": [...]}`, which gives a prompt a turn.

    Raises:
      ValueError: a line is neither, or there is none.
      OSError: the file cannot be read.
    """
    bundled = importlib.resources.files("specjax") / "prompts.jsonl"
    if file is not None and not Path(file).is_file():
        raise ValueError(f"no prompt file at {file}.")
    text = (bundled if file is None else Path(file)).read_text("utf-8")
    found = [
        prompt
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
        for prompt in _prompts(line, f"line {number} of {file or 'prompts.jsonl'}")
    ]
    if not found:
        raise ValueError(f"{file} holds no prompt.")
    return found


def _prompts(line: str, where: str) -> list[tuple[str, str]]:
    try:
        parsed = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}.") from error
    match parsed:
        case {"id": name, "prompt": str(text)}:
            return [(str(name), text)]
        case {"id": name, "turns": [*turns]} if all(isinstance(turn, str) for turn in turns):
            return [(f"{name}/{number}", turn) for number, turn in enumerate(turns)]
    raise ValueError(f'{where} has neither "id" and "prompt" nor "id" and "turns".')


def fitting(
    listed: Sequence[tuple[str, str]],
    tokenizer: "PreTrainedTokenizerFast",
    max_positions: int,
    max_new_tokens: int,
) -> tuple[list[Prompt], list[str]]:
    """The prompts that fit the model with their continuations, and the names of the others.

    Those left out are listed on standard error.

    Raises:
      ValueError: none fits.
    """
    chosen, left_out = [], []
    for name, text in listed:
        tokens = tokenizer(text).input_ids
        if tokens and len(tokens) + max_new_tokens <= max_positions:
            chosen.append(Prompt(name, tokens))
            continue
        left_out.append(name)
        print(
            f"specjax: prompt {name} is left out: {len(tokens)} tokens and {max_new_tokens} new "
            f"ones, for a context of {max_positions}.",
            file=sys.stderr,
        )
    if not chosen:
        raise ValueError(
            f"none of the {len(listed)} prompts fits {max_positions} tokens "
            f"with {max_new_tokens} new ones."
        )
    return chosen, left_out
