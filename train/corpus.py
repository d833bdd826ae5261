"""A run's documents: the user's, or the Python standard library; and its byte-level BPE."""

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from train.config import Corpus
from train.documents import Document
from train.files import read_files

END = "<|endoftext|>"


def read_corpus(corpus: Corpus, own: Sequence[Path] = ()) -> list[Document]:
    """The documents of a corpus; what lies in the folders `own` is none.

    Raises:
      ValueError: there is no text, or a file cannot be read as what it is.
    """
    if corpus.files:
        return read_files(corpus.files, corpus.slices, own)
    return standard_library(corpus)


def module_of(relative: Path) -> str:
    """The top-level module a file belongs to; a test belongs to the module it tests."""
    parts = [p.removesuffix(".py") for p in relative.parts]
    if parts[0] == "test" and len(parts) > 1:
        parts = parts[1:]
    return parts[0].removeprefix("test_").removeprefix("_") or parts[0]


def split_of(module: str, slices: int) -> str:
    """The split of a module, by a hash of its name: one in `slices` held out, one for dev."""
    number = int.from_bytes(hashlib.sha256(module.encode()).digest()[:8], "big") % slices
    return {0: "heldout", 1: "dev"}.get(number, "train")


def standard_library(corpus: Corpus) -> list[Document]:
    """All readable sources of the running interpreter's standard library, in path order.

    Raises:
      ValueError: no source file was found.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Document] = []
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if relative.parts[0] in corpus.exclude or "site-packages" in relative.parts:
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if not text.strip():
            continue
        module = module_of(relative)
        is_test = any(part in ("test", "tests", "idle_test") for part in relative.parts)
        found.append(Document(module, text, split_of(module, corpus.slices), is_test))
    if not found:
        raise ValueError(f"no Python source was found under {root}.")
    return _thinned(found, corpus.max_files) if corpus.max_files else found


def _thinned(documents: list[Document], most: int) -> list[Document]:
    """At most `most` evenly spaced documents of each split and kind."""
    groups: dict[tuple[str, bool], list[Document]] = {}
    for document in documents:
        groups.setdefault((document.split, document.is_test), []).append(document)
    return [d for group in groups.values() for d in group[:: -(-len(group) // most)]]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; token 0 ends a document. Any byte sequence can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


_PIECES = Regex(r" ?[A-Za-z]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\n+[ \t]*|[ \t]+(?=[ \t]\S)|\s+|.")
"""What merges never cross: words, numbers of up to three digits, punctuation, line ends."""
