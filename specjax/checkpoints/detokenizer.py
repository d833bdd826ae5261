"""Incremental detokenization: the text of tokens as they come, and of a token by itself."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are no character, or not yet one."""

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_KEPT = 8
"""Tokens that a shortened window starts with. An incomplete character is at most three bytes, so
three tokens would do."""
_LONGEST_WINDOW = 32
_LONGEST_UNSETTLED = 128
"""Tokens of a window in which stops are looked for before its run of byte tokens has ended."""


class SpecialToken(NamedTuple):
    """A token without text; encoding takes the spaces to its left or right into some of them."""

    name: str
    id: int
    lstrip: bool = False
    rstrip: bool = False


class SpecialTokens:
    """All special tokens of a tokenizer, found by their names.

    Args:
      tokens: of the tokenizer.
    """

    def __init__(self, tokens: Iterable[SpecialToken] = ()) -> None:
        self._tokens = {each.name: each for each in tokens if each.name}
        self._lengths = sorted({len(name) for name in self._tokens}, reverse=True)
        self._firsts = {name[0] for name in self._tokens}
        self.ids = frozenset(each.id for each in self._tokens.values())

    def __iter__(self) -> Iterator[SpecialToken]:
        return iter(self._tokens.values())

    def at(self, text: str, place: int) -> SpecialToken | None:
        """The one whose name begins at a place of a text: the longest, as tokenizers take it."""
        if text[place] not in self._firsts:
            return None
        names = (text[place : place + length] for length in self._lengths)
        return next((self._tokens[name] for name in names if name in self._tokens), None)


class TokenTexts:
    """What a tokenizer's tokens are as text and as bytes; one serves every request.

    Args:
      tokenizer: whose they are.
      shown: names of special tokens that are part of a text all the same.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerFast", shown: Collection[str] = frozenset()
    ) -> None:
        self._tokenizer, self._shows = tokenizer, bool(shown)
        vocabulary = tokenizer.get_vocab()
        self._names = {number: name for name, number in vocabulary.items()}
        self.special = SpecialTokens(
            SpecialToken(self._names[n], n, token.lstrip, token.rstrip)
            for n, token in tokenizer.added_tokens_decoder.items()
            if token.special and n in self._names and self._names[n] not in shown
        )
        self.visible = frozenset(self._names) - self.special.ids
        """Tokens that are part of a text; special ones and unknown ones are not."""
        self.byte_tokens = frozenset(
            number for name, number in vocabulary.items() if _BYTE_TOKEN.fullmatch(name)
        )
        """Tokens such as `<0x0A>`, of which runs are decoded together."""
        self.whole = self.visible - self.byte_tokens
        """Tokens before which a text can be cut."""
        self._anchor = [next((n for n, name in self._names.items() if name in ("a", "▁a")), 0)]
        self._anchor_length = len(self.decode(self._anchor, special=True))
        self._known: dict[int, tuple[str, bytes]] = {}
        self.last_prompt: tuple[Sequence[int], list[int], int] = ((), [], 0)
        """The prompt of the last `Detokenizer`, its window and that window's characters: the next
        one often has the same, and a prompt of byte tokens is decoded as a whole."""

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of `tokens`, with the special ones among them if asked for.

        Raises:
          ValueError: the tokenizers' library panics, which is no `Exception` of its own.
        """
        if self._shows and not special:
            tokens, special = [token for token in tokens if token in self.visible], True
        try:
            text = self._tokenizer.decode(
                list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )
        except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            raise ValueError(f"tokens cannot be decoded: {error}") from error
        return text if isinstance(text, str) else "".join(text)

    def names_of(self, tokens: Sequence[int]) -> list[str]:
        """What the vocabulary calls tokens."""
        return [self._names.get(token, "") for token in tokens]

    def text_of(self, token: int) -> str:
        r"""A token by itself, as log probabilities show it: `bytes:\xe2\x82` if it is no text."""
        return self._of(token)[0]

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        return self._of(token)[1]

    def _of(self, token: int) -> tuple[str, bytes]:
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def _find(self, token: int) -> tuple[str, bytes]:
        """Decoded behind another token: the first of a text may lose its leading space."""
        text = self.decode([*self._anchor, token], special=True)[self._anchor_length :]
        if INCOMPLETE not in text:
            return text, text.encode()
        own = _bytes_of_name(self._names.get(token, ""))
        if own is None:
            return text, text.encode()
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own), own


def _bytes_of_name(name: str) -> bytes | None:
    """The bytes of a token named by byte fallback or in the byte-level alphabet of GPT-2."""
    if _BYTE_TOKEN.fullmatch(name):
        return bytes([int(name[3:5], 16)])
    try:
        return bytes(_ALPHABET[letter] for letter in name)
    except KeyError:
        return None


def _alphabet() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable bytes as they are, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    shifted = {chr(256 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_ALPHABET = _alphabet()


class Detokenizer:
    """Text of tokens that follow a prompt, in pieces that never change afterwards.

    The pieces and `flush` together are the text of all the tokens after that of the prompt: if the
    prompt ends inside a character, they begin with that character. What may still change is held
    back: a character whose last byte is missing, and a run of byte tokens, which becomes one
    replacement character for each byte if any of it is no UTF-8. Only a window of the last tokens
    is decoded, so a token costs the same however long the text is.

    Args:
      texts: of the tokenizer.
      prompt: token ids; they must not change.
    """

    def __init__(self, texts: TokenTexts, prompt: Sequence[int]) -> None:
        self._texts = texts
        known, window, shown = texts.last_prompt  # of another thread perhaps, but whole
        if known is not prompt:
            window = self._end_of(prompt)
            shown = len(texts.decode(window).rstrip(INCOMPLETE))
            texts.last_prompt = prompt, window, shown
        self._window, self._shown = [*window], shown

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's last tokens, from a place where their text does not depend on others.

        That is no place inside a run of byte tokens, and one character must follow it.
        """
        texts, size = self._texts, _KEPT
        while True:
            start = max(len(prompt) - size, 0)
            while start and prompt[start] not in texts.whole:
                start -= 1
            window = [token for token in prompt[start:] if token in texts.visible]
            if not start or texts.decode(window).strip(INCOMPLETE):
                return window
            size = 2 * (len(prompt) - start)

    def add(self, token: int) -> str:
        """The text that one more token settles; may be empty."""
        if token not in self._texts.visible:
            return ""
        self._window.append(token)
        if token in self._texts.byte_tokens:
            return ""
        text = self._texts.decode(self._window)
        piece = self._show(text.removesuffix(INCOMPLETE))
        if len(self._window) > _LONGEST_WINDOW:
            self._shorten(len(text) - self._shown)
        return piece

    def flush(self) -> str:
        """The text that was held back, when no token follows."""
        return self._show(self._texts.decode(self._window))

    def unsettled(self) -> str:
        """Whole characters of byte tokens that were held back, which further bytes may change.

        Empty where their last character is not whole, and in very long runs.
        """
        if not self._window or self._window[-1] not in self._texts.byte_tokens:
            return ""
        if len(self._window) > _LONGEST_UNSETTLED:
            return ""
        text = self._texts.decode(self._window)
        return "" if text.endswith(INCOMPLETE) else text[self._shown :]

    def pending(self) -> str:
        """The text that `flush` would give."""
        return self._texts.decode(self._window)[self._shown :]

    def held_back(self, token: int) -> int:
        """Characters that were held back and that come before `token`: those of byte tokens."""
        if not self._window or self._window[-1] not in self._texts.byte_tokens:
            return 0
        if token in self._texts.byte_tokens:
            return len(self.unsettled())
        return len(self._texts.decode(self._window)) - self._shown

    def _show(self, settled: str) -> str:
        piece = settled[self._shown :]
        self._shown = max(self._shown, len(settled))
        return piece

    def _shorten(self, held_back: int) -> None:
        """Forgets all but the last tokens; the last of all is no byte token."""
        self._window = self._window[-_KEPT:]
        self._shown = len(self._texts.decode(self._window)) - held_back
