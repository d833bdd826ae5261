"""Token streams and the batches cut from them, as a pure function of the step."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from train.documents import SPLITS, Document

Encode = Callable[[list[str]], list[list[int]]]
"""Texts to tokens, without special ones."""


class Stream(NamedTuple):
    """Documents of one kind as tokens, each ended by an end token, with the bytes they stand for.

    `prompts` are those of the documents that are to be continued as a whole; they have no end
    token. `begin` is what every document begins with. Prompts that are `in_order` may become more:
    they are taken as they come, not shuffled.
    """

    documents: tuple[np.ndarray, ...]
    num_bytes: int
    prompts: tuple[np.ndarray, ...] = ()
    begin: tuple[int, ...] = ()
    in_order: bool = False


class Streams(NamedTuple):
    """The corpus as tokens."""

    train: Stream
    train_tests: Stream
    dev: Stream
    heldout: Stream


def encode(
    documents: Sequence[Document], encoder: Encode, end: int, begin: Sequence[int] = ()
) -> Streams:
    """Tokens of every document, by split; development and held-out streams hold no tests.

    Documents begin with `begin`, and end with `end` unless they are to be continued.
    """
    tokens = [np.array([*begin, *ids], np.int32) for ids in encoder([d.text for d in documents])]

    def stream(split: str, is_test: bool) -> Stream:
        chosen = [
            (t, d)
            for t, d in zip(tokens, documents, strict=True)
            if d.split == split and d.is_test == is_test
        ]
        return Stream(
            tuple(t if d.is_prompt else np.append(t, np.int32(end)) for t, d in chosen),
            sum(len(d.text.encode()) for _, d in chosen),
            tuple(t for t, d in chosen if d.is_prompt),
            tuple(begin),
        )

    others = (stream(split, False) for split in SPLITS[1:])
    return Streams(stream("train", False), stream("train", True), *others)


class Prompts:
    """What the target is to continue, of at most `length` tokens, as a function of the index.

    The stream's prompts, every epoch in an order of its own unless they are `in_order` (of a long
    one its beginning token and its last ones); where it has none, pieces of exactly `length`
    tokens cut from its documents.
    """

    def __init__(self, stream: Stream, length: int, seed: int) -> None:
        self._length, self._prompts, self._seed = length, stream.prompts, seed
        self._begin, self._in_order = stream.begin[: length - 1], stream.in_order
        self._cut = None if stream.prompts else Epochs(stream, length, seed)

    def at(self, index: int) -> list[int]:
        """Prompt number `index`; they repeat once all were given."""
        if self._cut is not None:
            return self._cut.at(index)[: self._length].tolist()
        epoch, place = divmod(index, len(self._prompts))
        if not self._in_order:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self._prompts))
            place = int(order[place])
        chosen, begin = self._prompts[place].tolist(), list(self._begin)
        if len(chosen) <= self._length:
            return chosen
        return (begin + chosen[len(begin) - self._length :])[: self._length]


class Epochs:
    """Sequences of `length + 1` tokens: each epoch shuffles documents, joins and cuts them."""

    def __init__(self, stream: Stream, length: int, seed: int) -> None:
        if not stream.documents:
            raise ValueError("the stream holds no document.")
        self._stream, self._length, self._seed = stream, length, seed
        self._per_epoch = max(1, (sum(map(len, stream.documents)) - 1) // length)
        self._epoch, self._rows = -1, np.zeros((0, length + 1), np.int32)

    def at(self, index: int) -> np.ndarray:
        """Sequence number `index` of the endless shuffled stream, int32 [length + 1]."""
        epoch, row = divmod(index, self._per_epoch)
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, self._cut(epoch)
        return self._rows[row]

    def _cut(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng((self._seed, epoch))
        order = rng.permutation(len(self._stream.documents))
        flat = np.concatenate([self._stream.documents[i] for i in order])
        flat = np.roll(flat, int(rng.integers(flat.size)))
        short = self._per_epoch * self._length + 1 - flat.size
        flat = np.pad(flat, (0, max(0, short)), mode="wrap")
        starts = np.arange(self._per_epoch)[:, None] * self._length
        rows = flat[starts + np.arange(self._length + 1)]
        return rows[rng.permutation(self._per_epoch)]


class Mixture:
    """Batches of the training streams; `batch(step)` depends on nothing but its arguments."""

    def __init__(self, streams: Streams, test_share: float, length: int, rows: int, seed: int):
        self._tests = round(rows * test_share) if streams.train_tests.documents else 0
        self._rows = rows
        self._code = Epochs(streams.train, length, seed)
        self._test_code = Epochs(streams.train_tests, length, seed) if self._tests else self._code

    def batch(self, step: int) -> np.ndarray:
        """Sequences of step `step`, int32 [rows, length + 1]."""
        code = self._rows - self._tests
        chosen = [self._code.at(step * code + i) for i in range(code)]
        chosen += [self._test_code.at(step * self._tests + i) for i in range(self._tests)]
        return np.stack(chosen)


def evaluation_rows(stream: Stream, length: int, rows: int) -> tuple[np.ndarray, float]:
    """Evenly spaced sequences `[rows, length + 1]` of a stream, and its bytes per token."""
    if not stream.documents:
        raise ValueError("the stream holds no document.")
    flat = np.concatenate(stream.documents)
    bytes_per_token = stream.num_bytes / flat.size
    available = max(1, (flat.size - 1) // length)
    flat = np.pad(flat, (0, max(0, available * length + 1 - flat.size)), mode="wrap")
    starts = np.unique(np.linspace(0, available - 1, min(rows, available)).astype(int)) * length
    return flat[starts[:, None] + np.arange(length + 1)], bytes_per_token


def evenly(stream: Stream, length: int, count: int, seed: int) -> list[list[int]]:
    """`count` pieces of at most `length` tokens, taking the stream's documents in turn."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        document = stream.documents[number % len(stream.documents)][:-1]
        start = int(rng.integers(max(1, len(document) - length)))
        found.append(document[start : start + length].tolist())
    return [ids for ids in found if ids]
