"""A choice of a request: tokens of an engine's sequence become text, cut at stop strings."""

import dataclasses
from collections import abc
from typing import TYPE_CHECKING

from specjax.checkpoints.detokenizer import INCOMPLETE, Detokenizer, TokenTexts
from specjax.engine.request import Logprob, Tokens
from specjax.server.stops import StopSearch, StopStrings
from specjax.server.tools import CallArguments, CallStart

if TYPE_CHECKING:
    from specjax.engine.sequence import Sequence


@dataclasses.dataclass(frozen=True)
class Echo:
    """A prompt that is repeated before its continuation; `offsets` place its tokens in `text`."""

    text: str
    ids: abc.Sequence[int] = ()
    offsets: abc.Sequence[int] = ()


@dataclasses.dataclass
class Delta:
    """What a choice has to give since it was last asked.

    `ids`, their log probabilities and their `offsets` in the choice's text are empty unless they
    were asked for. `finish_reason` is None while more may come. `calls` are what was read of
    tool calls, and `thought` of what the model thought first; they are no part of the text then.
    """

    index: int
    first: bool
    text: str
    ids: list[int]
    logprobs: list[Logprob | None]
    offsets: list[int]
    finish_reason: str | None
    calls: abc.Sequence[CallStart | CallArguments] = ()
    thought: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether nothing came but perhaps an end."""
        return not (self.text or self.ids or self.calls or self.thought)


class TextUntilStop:
    """Text of tokens up to the first stop string; see `Detokenizer` and `StopSearch`.

    Args:
      detokenizer: of the text.
      search: for stop strings; None if there are none.
      special: ids of the tokens that have no text.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        search: StopSearch | None,
        special: abc.Collection[int] = frozenset(),
    ) -> None:
        self._detokenizer = detokenizer
        self._search = search
        self._special = special
        self._decoded = 0

    def add(self, token: int) -> tuple[str, bool]:
        """The text that is certain with one more token, and whether it completed a stop string."""
        if token in self._special:
            return self.add_special(token)
        piece = self._detokenizer.add(token)
        self._decoded += len(piece)
        if self._search is None:
            return piece, False
        text, ended = self._search.add(piece)
        if not ended and (unsettled := self._detokenizer.unsettled()):
            ended = self._search.would_end(unsettled)
            if ended:
                text += self._search.add(unsettled)[0]
        return text, ended

    def add_special(self, token: int) -> tuple[str, bool]:
        """The same with a token that has no text; another than a special one changes nothing."""
        if self._search is None or token not in self._special:
            return "", False
        return self._search.add_token(token, self._detokenizer.pending())

    @property
    def found(self) -> str | None:
        """The stop string that was completed; None if none was."""
        return None if self._search is None else self._search.found

    def offset_of(self, token: int) -> int:
        """Characters of all tokens so far, given or held back, ahead of the next one."""
        return self._decoded + self._detokenizer.held_back(token)

    def flush(self) -> tuple[str, bool]:
        """The text that was held back, and whether it completes a stop string."""
        piece = self._detokenizer.flush()
        if self._search is None:
            return piece, False
        text, ended = self._search.add(piece)
        return (text, True) if ended else (text + self._search.flush(), False)


class Choice:
    """One continuation of a prompt, as its client gets it.

    Args:
      index: among the response's choices.
      sequence: the engine's, whose tokens it takes.
      texts: of the tokenizer.
      prompt: token ids.
      stops: strings that end the text; None if there are none.
      logprobs: whether log probabilities are given.
      echo: the prompt to repeat, or None.
    """

    def __init__(
        self,
        index: int,
        sequence: "Sequence",
        texts: TokenTexts,
        prompt: abc.Sequence[int],
        *,
        stops: StopStrings | None = None,
        logprobs: bool = False,
        echo: Echo | None = None,
    ) -> None:
        self.index = index
        self.sequence = sequence
        self.prompt_tokens = len(prompt)
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        search = None if stops is None else stops.search()
        self._text = TextUntilStop(Detokenizer(texts, prompt), search, texts.special.ids)
        self._wants_logprobs = logprobs
        self._echo = echo
        self._echoed = 0
        self._first = True
        self._pieces: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[Logprob | None] = []
        self._offsets: list[int] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None if something else did."""
        return self._text.found

    def take(self, tokens: Tokens) -> None:
        """Adds what a step gave; what follows a stop string is left out."""
        if self._echo is not None:
            self._repeat(self._echo)
        for place, token in enumerate(tokens.ids):
            self.completion_tokens += 1
            if self._wants_logprobs:
                self._note(
                    token, tokens.logprobs[place], self._echoed + self._text.offset_of(token)
                )
            is_end = tokens.finish_reason == "stop" and place + 1 == len(tokens.ids)
            add = self._text.add_special if is_end else self._text.add  # an end token has no text
            text, ended = add(token)
            self._pieces.append(text)
            if ended:
                self.finish_reason = "stop"
                return
        if tokens.finish_reason is not None:
            self._finish(tokens.finish_reason)

    def _finish(self, reason: str) -> None:
        text, ended = self._text.flush()
        self._pieces.append(text)
        self.finish_reason = "stop" if ended else reason

    def _repeat(self, echo: Echo) -> None:
        self._pieces.append(echo.text)
        self._echo, self._echoed = None, len(echo.text)
        if self._wants_logprobs:
            known = self.sequence.prompt_logprobs or [None] * len(echo.ids)
            for token, logprob, offset in zip(echo.ids, known, echo.offsets, strict=True):
                self._note(token, logprob, offset)

    def _note(self, token: int, logprob: Logprob | None, offset: int) -> None:
        self._ids.append(token)
        self._logprobs.append(logprob)
        self._offsets.append(offset)

    def delta(self) -> Delta | None:
        """What has come since the last call, merged; None if there is nothing to give."""
        text = "".join(self._pieces)
        if not text and not self._ids and self.finish_reason is None:
            return None
        delta = Delta(
            self.index, self._first, text, self._ids, self._logprobs, self._offsets,
            self.finish_reason,
        )  # fmt: skip
        self._first = False
        self._pieces, self._ids, self._logprobs, self._offsets = [], [], [], []
        return delta


def echo_of(texts: TokenTexts, ids: abc.Sequence[int], text: str | None, *, logprobs: bool) -> Echo:
    """What repeats a prompt: its own text if it was given as one, else that of its tokens.

    An incomplete character at its end is left to the continuation. Offsets are found only if
    `logprobs` are asked for.
    """
    shown = (texts.decode(ids) if text is None else text).rstrip(INCOMPLETE)
    if not logprobs:
        return Echo(shown)
    offsets, length, detokenizer = [], 0, Detokenizer(texts, [])
    for token in ids:
        offsets.append(length + detokenizer.held_back(token))
        length += len(detokenizer.add(token))
    return Echo(shown, list(ids), offsets)
