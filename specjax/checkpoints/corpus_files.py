"""Texts of files as a corpus that drafts are retrieved from."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.checkpoints.files import CheckpointError
from specjax.draft.retrieval import Corpus, corpus_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_corpus(
    files: Sequence[Path], tokenizer: "PreTrainedTokenizerFast", vocab_size: int
) -> Corpus:
    """The corpus of files: `.jsonl` with a `text`, a `prompt` or `turns` a line, or plain text.

    Raises:
      CheckpointError: a file cannot be read, or has no text.
    """
    texts = [text for file in files for text in _texts_of(file)]
    ids = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
    known = [[token for token in own if token < vocab_size] for own in ids]
    try:
        return corpus_of(known)
    except ValueError as error:
        raise CheckpointError(f"{', '.join(map(str, files))}: {error}") from error


def _texts_of(file: Path) -> list[str]:
    try:
        content = file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is no text in UTF-8: {error.reason}.") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    texts = list(_of_lines(file, content)) if file.suffix == ".jsonl" else [content]
    if not any(texts):
        raise CheckpointError(f"{file} has no text.")
    return texts


def _of_lines(file: Path, content: str) -> Iterator[str]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            held: Any = json.loads(line)
        except ValueError as error:
            raise CheckpointError(f"line {number} of {file} is no JSON: {error}") from error
        match held:
            case {"text": str(text)} | {"prompt": str(text)}:
                yield text
            case {"turns": [*turns]} if all(isinstance(turn, str) for turn in turns):
                yield from turns
            case _:
                raise CheckpointError(
                    f"line {number} of {file} is no object with a text, a prompt or turns."
                )
