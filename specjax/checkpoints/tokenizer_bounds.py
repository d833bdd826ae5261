"""What a tokenizer may cost: bytes of its files, how much longer it makes a text, and seconds.

A tokenizer's file is a small program: its replacements can multiply a text again and again, and its
regular expressions can take forever. Growth is therefore bounded before the file is loaded, from
what it says, and time where it runs.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from specjax.checkpoints.files import CheckpointError, parsed

FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
"""Those that a tokenizer may be read from."""
_SECONDS = 60.0
"""For a text; 4 MB of prose take 10 (2 cores of a Zen 5, which others used, 2026-11-27)."""
_LEAST_BYTES, _BYTES_A_TOKEN = 4 << 20, 1024
"""What a file may have, and more for each row of the model's vocabulary. Files of real tokenizers
have 70 to 135 a row."""
_ROWS = 1 << 20
"""Where the model's vocabulary is not known."""
_INPUT, _MOST_GROWTH = 64, 64
"""A text of so many bytes may become so many times as long. Real tokenizers make one character of
three bytes of each space."""
_LONGEST_STRING = 256
"""Bytes of what is written in place of something, or before each piece of a word."""
_MOST_ADDED = 256
"""Special tokens around a text."""
_MAYBE_EMPTY = re.compile(r"\(\?[=!<]|\\[bBGKAzZ]|[\^$*?|]|\{[0,]")
"""In a regular expression that may match between two characters."""
_FACTORS = {"ByteLevel": 2, "BertNormalizer": 2, "Metaspace": 4}
"""How much longer a step makes a text, at most."""
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_SEQUENCES = ("normalizers", "pretokenizers", "decoders", "processors")

_T = TypeVar("_T")


def check_files(folder: Path, vocab_size: int | None) -> None:
    """Checks a folder's tokenizer before it is loaded.

    Args:
      folder: a model's.
      vocab_size: rows of its vocabulary, None where they are not known.

    Raises:
      CheckpointError: a file is larger than one of such a vocabulary can be, or would make texts
        much longer.
    """
    most = _LEAST_BYTES + _BYTES_A_TOKEN * (_ROWS if vocab_size is None else vocab_size)
    for file in (folder / name for name in FILES):
        size = file.stat().st_size if file.is_file() else 0
        if size > most:
            of = "" if vocab_size is None else f" for the model's vocabulary of {vocab_size:,}"
            raise CheckpointError(f"{file} has {size:,} bytes; it may have {most:,}{of}.")
    if (folder / FILES[0]).is_file():
        found = parsed(folder / FILES[0])
        with _one_sentence(folder / FILES[0]):
            _check_growth(found)


@contextlib.contextmanager
def _one_sentence(file: Path) -> Iterator[None]:
    """Says which file it is; what has not the form of a tokenizer is left to the library."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except (AttributeError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a tokenizer's: {error!r}.") from error


def _check_growth(tokenizer: Mapping[str, Any]) -> None:
    for part in _PARTS:
        grown = _grown(tokenizer.get(part), _INPUT)
        if grown > _MOST_GROWTH * _INPUT:
            raise ValueError(
                f"its {part} can make a text {grown / _INPUT:.3g} times as long; it may make it "
                f"{_MOST_GROWTH} times as long."
            )
    added = _added(tokenizer.get("post_processor"))
    if added > _MOST_ADDED:
        raise ValueError(
            f"its post_processor adds {added:,} tokens to a text; it may add {_MOST_ADDED}."
        )
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        _short(name, (tokenizer.get("model") or {}).get(name))


def _grown(step: Any, length: float | int) -> float | int:
    """How many bytes a step may make of so many; infinity stands for more than a float holds."""
    if step is None:
        return length
    for name in _SEQUENCES:
        for inner in step.get(name) or ():
            length = _grown(inner, length)
    if step.get("type") == "Prepend":
        return length + _short("prepend", step.get("prepend"))
    if step.get("type") != "Replace":
        return length * _FACTORS.get(step.get("type"), 1)
    content = _short("content", step.get("content"))
    pattern = step["pattern"]
    if "Regex" in pattern:
        maybe_empty = _MAYBE_EMPTY.search(pattern["Regex"]) or not pattern["Regex"]
        return length + (length + 1) * content if maybe_empty else length * max(1, content)
    replaced = len(pattern["String"].encode())
    return length * max(1.0, content / replaced) if replaced else length + (length + 1) * content


def _short(name: str, text: str | None) -> int:
    """The bytes of a text that a step writes.

    Raises:
      ValueError: they are too many.
    """
    size = len((text or "").encode())
    if size > _LONGEST_STRING:
        raise ValueError(f"its {name} has {size:,} bytes; it may have {_LONGEST_STRING}.")
    return size


def _added(step: Any) -> int:
    """How many tokens a post-processor adds.

    Raises:
      ValueError: it repeats the text.
    """
    if step is None:
        return 0
    added = sum(_added(inner) for inner in step.get("processors") or ())
    if step.get("type") != "TemplateProcessing":
        return added
    ids = {name: len(own["ids"]) for name, own in step["special_tokens"].items()}
    for form in ("single", "pair"):
        pieces = step.get(form) or ()
        texts = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
        if len(texts) > len(set(texts)):
            raise ValueError(f"its post_processor repeats the text {len(texts)} times.")
    own = [piece["SpecialToken"]["id"] for piece in step["single"] if "SpecialToken" in piece]
    return added + sum(ids.get(name, 0) for name in own)


def bounded(work: Callable[[], _T], what: str, seconds: float = _SECONDS) -> _T:
    """The result of what a tokenizer's library does, in a thread that is left alone past its time.

    Args:
      work: releases Python's lock, as the library does where it tokenizes lists of texts.
      what: begins the sentence of an error.
      seconds: for `work`.

    Raises:
      ValueError: it failed, by a panic of the library's too, or took longer.
    """
    result: list[_T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # panics are no Exception
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="specjax-tokenizer")
    thread.start()
    thread.join(seconds)
    if failure and isinstance(failure[0], MemoryError):
        raise failure[0]
    if failure:
        message = str(failure[0]).partition("\n")[0]
        raise ValueError(f"{what} cannot be tokenized: {message}") from failure[0]
    if not result:
        raise ValueError(f"{what} took more than {seconds:g} seconds to tokenize.")
    return result[0]
