"""What a corpus consists of."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

SPLITS = ("train", "dev", "heldout")


class Document(NamedTuple):
    """One text: its name, what it is for, and what it is.

    `module` names the file, the line, or the library's top-level module that it belongs to.
    `is_test` texts are trained on at a share of their own; an `is_prompt` is what the target is
    asked to continue as a whole.
    """

    module: str
    text: str
    split: str
    is_test: bool = False
    is_prompt: bool = False


def fingerprint(documents: Sequence[Document]) -> str:
    """A number that changes with any text of a corpus, or with its split."""
    found = hashlib.sha256()
    for document in documents:
        found.update(repr(document._replace(module="")).encode())
    return found.hexdigest()[:16]
