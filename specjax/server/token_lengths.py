"""How many bytes of a text a token can stand for, where a tokenizer lets that be known."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SHRINKS = {
    "NFC": 4, "NFKC": 4, "NFD": 4, "NFKD": 4, "Lowercase": 3, "Prepend": 1, "ByteLevel": 1,
}  # fmt: skip
"""Normalizers that keep every character, and to what part they may shrink a text's bytes."""
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def most_bytes_of_tokens(tokenizer: "PreTrainedTokenizerFast") -> int | None:
    """Bytes of a text that a token stands for at most; None where there may be any number.

    There may where a normalizer or a pre-tokenizer drops text, where added tokens take the spaces
    around them, and where all unknown text becomes one token.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE":
        return None
    added = tokenizer.added_tokens_decoder.values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    before = [*_parts(backend.pre_tokenizer, "pretokenizers")]
    by_bytes = any(part["type"] == "ByteLevel" for part in before)
    normalizers = [*_parts(backend.normalizer, "normalizers")]
    by_bytes |= any(part["type"] == "ByteLevel" for part in normalizers)
    vocabulary = tokenizer.get_vocab()
    if not by_bytes and not (backend.model.byte_fallback and vocabulary.keys() >= _BYTES):
        return None
    shrinks = [_shrink(part) for part in normalizers]
    if None in shrinks or any(_drops(part) for part in before):
        return None
    longest = max(len(name) if by_bytes else len(name.encode()) for name in vocabulary)
    longest = max([longest, *(len(token.content.encode()) for token in added)])
    for shrink in shrinks:
        longest *= shrink or 1
    return longest


def _parts(part: Any, name: str) -> list[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer, or those of a sequence, as their file has them."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return _flat(state, name)


def _flat(state: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [each for part in state[name] for each in _flat(part, name)]


def _shrink(part: Mapping[str, Any]) -> int | None:
    """To what part of its bytes a normalizer may shrink a text; None where there is no limit."""
    if part["type"] != "Replace":
        return _SHRINKS.get(part["type"])
    literal = part["pattern"].get("String")
    kept = literal is not None and len(part["content"].encode()) >= len(literal.encode())
    return 1 if kept else None


def _drops(part: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer may drop text."""
    if part["type"] in ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts"):
        return False
    return part["type"] not in ("Split", "Punctuation") or part["behavior"] == "Removed"
