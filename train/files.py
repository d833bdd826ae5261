"""The user's own corpus: text files, folders of source code, and lines of JSON."""

import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from specjax.measure import prompts
from train.documents import SPLITS, Document

_FEWEST = 12
"""Fewer documents than this are cut into pieces, so that some can be held out."""


def read_files(names: Sequence[str], slices: int, own: Sequence[Path] = ()) -> list[Document]:
    """The documents in `names`, about one of `slices` held out and one for development.

    A `.jsonl` file holds `{"text": ...}`, `{"prompt": ...}` or `{"turns": [...]}` a line, of which
    each turn is a prompt; of a folder every readable text file counts, hidden ones and what lies in
    the folders `own` apart; a `.jsonl` with other lines is left out, which standard error says.
    Equal texts are one document. A corpus of few documents is cut at line ends.

    Raises:
      ValueError: a name is neither file nor folder, a file is not UTF-8, a line is not such an
        object, or there is too little text for three documents.
    """
    read = [document for name in names for document in _read(Path(name), own)]
    found = list({document.text: document for document in read if document.text.strip()}.values())
    listed = ", ".join(names)
    if not found:
        raise ValueError(f"the corpus {listed} holds no text.")
    if len(found) < _FEWEST:
        found = [piece for document in found for piece in _pieces(document, len(found))]
    if len(found) < len(SPLITS):
        raise ValueError(
            f"the corpus {listed} has {len(found)} lines of text; at least {len(SPLITS)} are "
            "needed, to train on some and to hold some out."
        )
    return _split(found, slices)


def _read(path: Path, own: Sequence[Path]) -> Iterator[Document]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            mine = any(file.resolve().is_relative_to(each.resolve()) for each in own)
            if file.is_file() and not hidden and not mine:
                yield from _of_folder(file)
    elif not path.is_file():
        raise ValueError(f"the corpus names {str(path)!r}, which is neither a file nor a folder.")
    elif path.suffix == ".jsonl":
        yield from _lines(path)
    else:
        yield Document(str(path), prompts.read_text(path, str(path)), "train")


def _of_folder(file: Path) -> Iterator[Document]:
    """A folder's file, if it is text; folders hold images, archives and other lines, too."""
    if file.suffix == ".jsonl":
        try:
            yield from list(_lines(file))
        except (ValueError, OSError) as error:
            print(f"train.run: {file} is left out: {error}", file=sys.stderr)
        return
    try:
        text = file.read_text("utf-8")
    except (ValueError, OSError):
        return
    if "\0" not in text:
        yield Document(str(file), text, "train")


def _lines(path: Path) -> Iterator[Document]:
    for number, line in prompts.json_lines(path, str(path)):
        where = f"line {number} of {path}"
        match line:
            case {"text": str(text)}:
                yield Document(f"{path}:{number}", prompts.checked(text, where), "train")
            case {"prompt": str(text)}:
                document = Document(
                    f"{path}:{number}", prompts.checked(text, where), "train", is_prompt=True
                )
                yield document
            case {"turns": [*turns]} if all(isinstance(turn, str) for turn in turns):
                for place, turn in enumerate(turns):
                    text, name = prompts.checked(turn, where), f"{path}:{number}/{place}"
                    yield Document(name, text, "train", is_prompt=True)
            case _:
                raise ValueError(
                    f'{where} has neither a "text" nor a "prompt" that is a string, nor "turns" '
                    "that are a list of strings."
                )


def _pieces(document: Document, documents: int) -> Iterator[Document]:
    """A document's parts, about as many as bring all documents together to `_FEWEST`."""
    if document.is_prompt:
        yield document
        return
    lines = document.text.splitlines(keepends=True)
    size = max(1, math.ceil(len(lines) / math.ceil(_FEWEST / documents)))
    for start in range(0, len(lines), size):
        text = "".join(lines[start : start + size])
        if text.strip():
            yield document._replace(module=f"{document.module}:{start + 1}", text=text)


def _split(documents: list[Document], slices: int) -> list[Document]:
    """The same in their order, splits assigned by the rank of a hash: none is ever empty."""
    hashes = [hashlib.sha256(d.text.encode()).digest() for d in documents]
    order = sorted(range(len(documents)), key=hashes.__getitem__)
    slices = max(len(SPLITS), min(slices, len(documents)))
    split = {0: "heldout", 1: "dev"}
    place = {index: split.get(rank % slices, "train") for rank, index in enumerate(order)}
    return [d._replace(split=place[index]) for index, d in enumerate(documents)]
