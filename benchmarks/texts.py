"""Prompts with the group that they are reported in, and how they are put to a model."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.checkpoints.tokenizers import encode, ids_of_talk
from specjax.measure.prompts import checked, json_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MT_BENCH = "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"
"""MT-bench's categories, which are one of Spec-Bench's six."""
CONVERSATION = "mt_bench"


@dataclasses.dataclass(frozen=True)
class Text:
    """A prompt.

    Attributes:
      name: its id.
      group: its category, or the name of its file.
      tokens: what the model reads.
      chat: whether that is a chat's first turn, in the model's template.
      new_tokens: how many are generated.
      room: how many a program has room for, which is compiled for all alike.
    """

    name: str
    group: str
    tokens: tuple[int, ...]
    chat: bool
    new_tokens: int = 0
    room: int = 0


@dataclasses.dataclass(frozen=True)
class _Line:
    name: str
    group: str
    text: str
    turn: bool


def read(
    files: Sequence[str],
    tokenizer: "PreTrainedTokenizerFast",
    most: int,
    limit: int | None = None,
) -> list[Text]:
    """The prompts of files, group by group; those that do not fit are left out.

    Lines `{"id", "turns"}` are conversations, of which the first turn is taken; it goes through the
    chat template, if there is one. Lines `{"id", "prompt"}` are continued as they are. A line's
    `category` is its group.

    Args:
      files: of JSON lines.
      tokenizer: the model's.
      most: tokens that a prompt may have.
      limit: of prompts of each group; spread evenly over it.

    Raises:
      ValueError: there is no such file, a line is neither of both, or no prompt fits.
    """
    groups: dict[str, list[Text]] = {}
    for line in (line for file in files for line in _lines(file)):
        chat = line.turn and bool(tokenizer.chat_template)
        if chat:
            ids = ids_of_talk(tokenizer, [{"role": "user", "content": line.text}])
        else:
            ids = encode(tokenizer, line.text, what=f"prompt {line.name}")
        if 0 < len(ids) <= most:
            text = Text(line.name, line.group, tuple(ids), chat)
            groups.setdefault(line.group, []).append(text)
    if not groups:
        raise ValueError(f"no prompt of {', '.join(files)} has at most {most} tokens.")
    return [text for own in groups.values() for text in spread(own, limit)]


def spread(texts: Sequence[Text], limit: int | None) -> list[Text]:
    """At most so many of them, at equal distances."""
    if limit is None or len(texts) <= limit:
        return list(texts)
    return [texts[number * len(texts) // limit] for number in range(limit)]


def _lines(file: str) -> list[_Line]:
    if not Path(file).is_file():
        raise ValueError(f"no prompt file at {file}.")
    return [_line(each, file, number) for number, each in json_lines(Path(file), file)]


def _line(line: Any, file: str, number: int) -> _Line:
    where = f"line {number} of {file}"
    match line:
        case {"id": name, "prompt": str(text)}:
            turn = False
        case {"id": name, "turns": [str(text), *_]}:
            turn = True
        case _:
            raise ValueError(f'{where} has neither "id" and "prompt" nor "id" and "turns".')
    stem = Path(file).stem
    group = str(line.get("category") or stem)
    return _Line(
        str(name), CONVERSATION if group in MT_BENCH else group, checked(text, where), turn
    )
