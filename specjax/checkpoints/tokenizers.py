"""Tokenizers of folders, whether two models mean the same by them, and drafts fitted to that."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array
from tokenizers import Tokenizer

from specjax.base.notices import notice
from specjax.base.pytree import replace
from specjax.checkpoints import gguf
from specjax.checkpoints.files import CheckpointError, Files, Name, find, parsed
from specjax.checkpoints.tokenizer_bounds import bounded, check_files
from specjax.models import pruning
from specjax.models.config import ModelConfig
from specjax.models.quantized import PackedWeight
from specjax.models.transformer import Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Contents = Mapping[str, int]
Message = dict[str, str]
"""Its `role` and `content`, as chat templates take them."""
_FILE = "tokenizer.json"
_FILES = (_FILE, "tokenizer.model", "vocab.json", "tokenizer_config.json")
_SHOWN = 3


def tokenizer_of(
    folder: Name | Sequence[Name], vocab_size: int | None = None
) -> "PreTrainedTokenizerFast":
    """The transformers tokenizer stored in `folder`, or in a GGUF file.

    Args:
      folder: a model's.
      vocab_size: rows of the model's vocabulary, where they are known. A notice says that the
        tokenizer has tokens beyond them.

    Raises:
      CheckpointError: the folder holds no tokenizer, or one that cannot be read, is too large for
        the vocabulary or would make texts much longer.
    """
    folder = find(folder).path
    _quieten()
    if gguf.is_gguf(folder):
        with _named(f"the tokenizer in {folder}"):
            return _fits(gguf.tokenizer_of(folder), folder, vocab_size)
    if not any((folder / name).is_file() for name in _FILES):
        raise CheckpointError(f"no tokenizer in {folder}; it needs a {_FILE}.")
    check_files(folder, vocab_size)
    from transformers import AutoTokenizer

    with _named(f"the tokenizer in {folder}"):
        found = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        return _fits(found, folder, vocab_size)


def _fits(
    found: "PreTrainedTokenizerFast", folder: Path, vocab_size: int | None
) -> "PreTrainedTokenizerFast":
    """The tokenizer, with a notice where it has more tokens than the vocabulary has rows."""
    found.decode(found("a").input_ids)  # what is wrong in its settings fails here
    last = max(found.get_vocab().values(), default=-1)
    if vocab_size is not None and last >= vocab_size:
        notice(
            f"the tokenizer in {folder} has tokens up to {last:,}, and the model a vocabulary of "
            f"{vocab_size:,}; a prompt with one beyond is refused."
        )
    return found


def encode(
    tokenizer: "PreTrainedTokenizerFast", text: str, *, special: bool = True, what: str = "a prompt"
) -> list[int]:
    """The token ids of a text.

    Args:
      tokenizer: of `tokenizer_of`.
      text: to be tokenized.
      special: whether special tokens are put around it, as the tokenizer does.
      what: begins the sentence of an error.

    Raises:
      ValueError: the library fails, or takes longer than any text that fits a model.
    """
    return bounded(
        lambda: list(tokenizer(text, add_special_tokens=special, verbose=False).input_ids), what
    )


def ids_of_talk(tokenizer: "PreTrainedTokenizerFast", messages: Sequence[Message]) -> list[int]:
    """The tokens of a talk, up to where the model's next reply begins.

    Raises:
      ValueError: the tokenizer's template is none, or refuses such a talk.
    """
    try:
        text: Any = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # what a template raises has no type of its own
        raise ValueError(f"the chat template cannot be used: {error}") from error
    return encode(tokenizer, text, special=False, what="the prompt")


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Lets what a tokenizer's file makes the library raise say which file it is.

    Its errors have no type of their own, and those of its Rust are no `Exception`.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, CheckpointError):
        raise
    except BaseException as error:
        raise CheckpointError(f"{what} cannot be read: {error}") from error


def save_tokenizer(
    tokenizer: "Tokenizer | PreTrainedTokenizerFast", folder: Path, config: ModelConfig
) -> None:
    """Writes a tokenizer as transformers reads it; a bare one adds no special tokens."""
    _quieten()
    from transformers import PreTrainedTokenizerFast

    if isinstance(tokenizer, Tokenizer):
        eos = tokenizer.id_to_token(config.eos_ids[0]) if config.eos_ids else None
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=eos,
            clean_up_tokenization_spaces=False,
            model_max_length=config.max_positions,
        )
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    saved = parsed(path)
    if saved.get("tokenizer_class") == "TokenizersBackend":  # transformers 4 knows the old name
        saved["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")


class Vocabulary(NamedTuple):
    """What a folder's model means by its tokens; it has `rows` of them, some perhaps of padding.

    `contents` is None where there is no tokenizer that can be compared.
    """

    folder: Path
    rows: int
    contents: Contents | None


def vocabulary_of(files: Files, config: ModelConfig) -> Vocabulary:
    """A model's vocabulary, as its folder's tokenizer has it.

    Raises:
      CheckpointError: the tokenizer cannot be read, or is too large for the model's vocabulary.
    """
    return Vocabulary(files.path, config.vocab_size, _contents(files, config.vocab_size))


def _contents(files: Files, vocab_size: int) -> Contents | None:
    """The tokens with their numbers, added ones too.

    Other files than `tokenizer.json` may need packages that are not here; then there are none.
    """
    if gguf.is_gguf(files.path):
        return gguf.vocabulary_of(files.path)
    file = files.path / _FILE
    if not file.is_file():
        try:
            return tokenizer_of(files.path, vocab_size).get_vocab()
        except CheckpointError:
            return None
    check_files(files.path, vocab_size)
    with _named(str(file)):
        return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)


class Difference(NamedTuple):
    """Numbers that two vocabularies give to different tokens: how many of how many, and some."""

    number: int
    of: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.number:,} of {self.of:,} tokens differ, such as {'; '.join(self.examples)}"


def difference(target: Contents, draft: Contents) -> Difference | None:
    """How a draft's vocabulary differs from its target's, or None."""
    names, others = ({number: token for token, number in each.items()} for each in (target, draft))
    differing = sorted(n for n in {*names, *others} if names.get(n) != others.get(n))
    if not differing:
        return None
    shown = tuple(f"{n} is {names.get(n)!r}, and {others.get(n)!r}" for n in differing[:_SHOWN])
    return Difference(len(differing), len({*names, *others}), shown)


class VocabularyMatch(NamedTuple):
    """Whether a draft's tokens are its target's, why not, and how many are known."""

    same: bool
    reason: str
    known: int


def compared(target: Vocabulary, draft: Vocabulary) -> VocabularyMatch:
    """Whether a draft means by its tokens what its target does.

    Tables may have other numbers of rows: those past the known tokens are padding, and tokens that
    a draft has no row for are never proposed. Without contents on both sides, tables must be equal.
    """
    sizes = f"{target.rows:,} and {draft.rows:,} rows"
    if target.contents is None or draft.contents is None:
        which = target if target.contents is None else draft
        reason = f"{which.folder} has no tokenizer that can be compared; tables of {sizes}"
        return VocabularyMatch(target.rows == draft.rows, reason, target.rows)
    known = max(target.contents.values()) + 1
    if found := difference(target.contents, draft.contents):
        return VocabularyMatch(False, f"{found} (the model's first)", known)
    reason = f"the same {known:,} tokens"
    if target.rows != draft.rows:
        reason += f"; tables of {sizes}"
    return VocabularyMatch(True, reason, known)


def fitted(model: Model, size: int, known: int) -> Model:
    """A draft with tables of `size` rows, of which it proposes those of the `known` that it has.

    What it has beyond is cut off, what it lacks filled up.
    """
    if model.config.vocab_size == size:
        return model

    def rows(part: Array) -> Array:
        spare = max(0, size - part.shape[0])
        return jnp.pad(part, ((0, spare), (0, 0)))[:size]

    def fit(table: Array | PackedWeight | None) -> Array | PackedWeight | None:
        if isinstance(table, PackedWeight):
            return table.of_rows(rows)
        return None if table is None else rows(table)

    if model.row_of is not None:
        return pruning.resized(model, size, known)
    proposed = min(known, size, model.config.vocab_size)
    config = dataclasses.replace(model.config, vocab_size=size, num_known=proposed)
    embedding, unembedding = fit(model.embedding), fit(model.unembedding)
    return replace(model, embedding=embedding, unembedding=unembedding, config=config)


def _quieten() -> None:
    """Keeps transformers from advising, at import, to install PyTorch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
