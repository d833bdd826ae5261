"""Prompts that a chat model writes itself: its own user turns (Magpie, arXiv 2406.08464).

Its chat template is rendered up to where a user's text begins, with the first words of one if
there are any, and the target goes on from there until it ends the turn. The whole is put into the
template as a user's text would be.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from train.chunks import Arrays, is_made, load_chunk, make_chunk
from train.config import Turns
from train.corpus import split_of
from train.data import Stream
from train.documents import SPLITS
from train.loop import Log
from train.served import EngineRows, requests_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MARK = "\ue000"
_LEAST = 0.02
"""A target of whose turns fewer are usable writes none."""


def opening(tokenizer: "PreTrainedTokenizerFast", words: str = "") -> list[int]:
    """The tokens of a chat up to where its first user's text begins, and of its first `words`.

    Raises:
      ValueError: there is no chat template, or it does not show a user's text once.
    """
    return _ids(tokenizer, _rendered(tokenizer, _MARK, False).partition(_MARK)[0] + words)


def prompt_of(tokenizer: "PreTrainedTokenizerFast", text: str) -> list[int]:
    """The tokens of a chat in which a user wrote `text`, up to where the answer begins."""
    return _ids(tokenizer, _rendered(tokenizer, text, True))


def _rendered(tokenizer: "PreTrainedTokenizerFast", text: str, answered: bool) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            "the target has no chat template; turns.tokens=0 collect.chat=False takes the corpus' "
            "prompts as they are."
        )
    talk = [{"role": "user", "content": text}]
    found = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=answered)
    if text == _MARK and str(found).count(_MARK) != 1:
        raise ValueError(
            f"the target's chat template shows a user's text {str(found).count(_MARK)} times; "
            "turns need one that shows it once."
        )
    return str(found)


def _ids(tokenizer: "PreTrainedTokenizerFast", text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


class WrittenTurns:
    """Turns that the target wrote, batch by batch, in `folder`.

    Of each text the first is kept. Which split it belongs to depends on the text alone, with
    `slices` as in the corpus; so no more than `slices - 2` of `slices` are trained on.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: "PreTrainedTokenizerFast",
        settings: Turns,
        eos_ids: tuple[int, ...],
        slices: int,
        longest: int,
    ) -> None:
        self._folder, self._tokenizer, self._settings = folder, tokenizer, settings
        self._eos_ids, self._slices, self._longest = eos_ids, slices, longest
        self._found: dict[str, dict[str, np.ndarray]] = {split: {} for split in SPLITS}
        self._seen: set[str] = set()
        self._batches = 0

    def of(self, split: str, count: int, rows: Callable[[], EngineRows], log: Log) -> Stream:
        """At least `count` prompts of a split; turns are written in `rows` until there are so many.

        Raises:
          ValueError: the target has no fitting chat template, or ends hardly any turn.
        """
        while len(self._found[split]) < count:
            make_chunk(
                "turns", self._folder, self._batches,
                lambda index: self._write(index, rows()), log,
            )  # fmt: skip
            self._read_next()
        return Stream((), 0, tuple(self._found[split].values()), in_order=True)

    def texts(self, split: str, most: int) -> list[str]:
        """The first texts of a split, at most `most`, among the turns that are written.

        Raises:
          ValueError: the target has no chat template, or ended hardly any turn.
        """
        while len(self._found[split]) < most and is_made(self._folder, self._batches):
            self._read_next()
        return list(self._found[split])[:most]

    def _read_next(self) -> None:
        self._read(
            self._beginnings(self._batches), load_chunk("turns", self._folder, self._batches)
        )
        self._batches += 1
        self._check()

    def _beginnings(self, index: int) -> list[str]:
        """With what the turns of a batch begin."""
        own = self._settings
        if index < own.free or not own.beginnings:
            return [""] * own.batch
        numbers = (index - own.free) * own.batch + np.arange(own.batch)
        return [own.beginnings[number % len(own.beginnings)] for number in numbers]

    def _write(self, index: int, rows: EngineRows) -> Arrays:
        own = self._settings
        begun = [opening(self._tokenizer, words) for words in self._beginnings(index)]
        first = index * own.batch
        numbers = np.arange(first, first + own.batch)
        temperature = np.array(own.temperatures, np.float32)[numbers % len(own.temperatures)]
        asked = requests_of(begun, temperature, own.tokens, first, own.seed)
        texts = [made.ids for made in rows.ask(asked).result()]
        tokens = np.zeros((own.batch, own.tokens), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        length = np.array([len(text) for text in texts], np.int32)
        return {"tokens": tokens, "length": length, "temperature": temperature}

    def _read(self, beginnings: list[str], arrays: Arrays) -> None:
        for words, turn in self._ended(beginnings, arrays):
            text = words + str(self._tokenizer.decode(turn, skip_special_tokens=True))
            text = text.strip()
            if not text or text in self._seen:
                continue
            self._seen.add(text)
            prompt = prompt_of(self._tokenizer, text)
            if len(prompt) <= self._longest:
                self._found[split_of(text, self._slices)][text] = np.array(prompt, np.int32)

    def _ended(
        self, beginnings: list[str], arrays: Arrays
    ) -> Iterator[tuple[str, Int[np.ndarray, " T"]]]:
        """The turns that the target ended by itself, without the token that ends them."""
        for words, tokens, length in zip(
            beginnings, arrays["tokens"], arrays["length"], strict=True
        ):
            if length and tokens[length - 1] in self._eos_ids:
                yield words, tokens[: length - 1]

    def _check(self) -> None:
        usable, written = len(self._seen), self._batches * self._settings.batch
        if usable < _LEAST * written:
            raise ValueError(
                f"of {written} turns that the target wrote {usable} ended and differ; it writes no "
                "prompts for itself. turns.tokens=0 takes the prompts of the corpus."
            )
