"""Prompts to measure on: a file of lines, or the ones that come with the package."""

import importlib.resources
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specjax.checkpoints.tokenizers import encode, ids_of_talk

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
      ValueError: the file is not UTF-8, a line is neither, or there is none.
      OSError: the file cannot be read.
    """
    bundled = importlib.resources.files("specjax") / "prompts.jsonl"
    if file is not None and not Path(file).is_file():
        raise ValueError(f"no prompt file at {file}.")
    name = file or "prompts.jsonl"
    found = [
        prompt
        for number, line in json_lines(bundled if file is None else Path(file), name)
        for prompt in _prompts(line, f"line {number} of {name}")
    ]
    if not found:
        raise ValueError(f"{name} holds no prompt.")
    return found


def json_lines(file: Path | Traversable, name: str) -> Iterator[tuple[int, Any]]:
    """What a file's lines hold, with their numbers from 1; empty ones are passed over.

    Raises:
      ValueError: the file is not UTF-8, or a line is not JSON; `name` is in the sentence.
      OSError: the file cannot be read.
    """
    for number, line in enumerate(read_text(file, name).split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} of {name} is not JSON: {error}.") from error


def read_text(file: Path | Traversable, name: str) -> str:
    """A file's text.

    Raises:
      ValueError: it is not UTF-8; `name` is in the sentence.
      OSError: the file cannot be read.
    """
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: byte {error.start} is not.") from error


def checked(text: str, what: str) -> str:
    """The text, if it is one that UTF-8 can write; half of a character cannot be tokenized.

    Raises:
      ValueError: it cannot; `what` names it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} is not UTF-8 text: character {error.start} is {text[error.start]!r}."
        ) from error
    return text


def _prompts(line: Any, where: str) -> list[tuple[str, str]]:
    match line:
        case {"id": name, "prompt": str(text)}:
            return [(str(name), checked(text, where))]
        case {"id": name, "turns": [*turns]} if all(isinstance(turn, str) for turn in turns):
            return [(f"{name}/{number}", checked(turn, where)) for number, turn in enumerate(turns)]
    raise ValueError(f'{where} has neither "id" and "prompt" nor "id" and "turns".')


def fitting(
    listed: Sequence[tuple[str, str]],
    tokenizer: "PreTrainedTokenizerFast",
    max_positions: int,
    max_new_tokens: int,
    chat: bool = False,
) -> tuple[list[Prompt], list[str]]:
    """The prompts that fit the model with their continuations, and the names of the others.

    Those left out are listed on standard error. With `chat` each is a user's message, in the
    model's chat template.

    Raises:
      ValueError: none fits, or there is no chat template for them.
    """
    if chat and not tokenizer.chat_template:
        raise ValueError("--chat needs a chat template, and the model has none.")
    chosen, left_out = [], []
    for name, text in listed:
        if chat:
            tokens = ids_of_talk(tokenizer, [{"role": "user", "content": text}])
        else:
            tokens = encode(tokenizer, text, what=f"prompt {name}")
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
