"""llama.cpp through its Python binding: texts of a GGUF file, plain and with drafts.

The loop over drafts is that of llama.cpp's `speculative-simple`, in Python: one batch of the last
token and the drafted ones, a sample by llama.cpp's own sampler after each, and a drafted token is
kept if it is the sample. Passes, caches and samples are llama.cpp's; Python takes some tens of
microseconds a token.
"""

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import Json
from benchmarks.rounds import Run, Sampled
from benchmarks.texts import Text
from specjax.base.prefix import common_prefix

_BATCH = 512
"""Tokens of a prompt that are read at a time, llama.cpp's default of a physical batch."""

Drafts = Callable[[Sequence[int], int], Sequence[int]]
"""From a text and a number to at most so many tokens after it."""


def available() -> bool:
    """Whether the binding can be imported."""
    return importlib.util.find_spec("llama_cpp") is not None


def version() -> str:
    """Of the binding."""
    return importlib.import_module("llama_cpp").__version__


class Session:
    """A model of llama.cpp's with one text in its cache.

    Args:
      file: a GGUF file.
      positions: of the cache.
      digest: changes with what the file holds.
    """

    def __init__(self, file: Path, positions: int, digest: str = "") -> None:
        self.digest = digest
        self._api: Any = importlib.import_module("llama_cpp")
        cores = os.cpu_count()
        self._model = self._api.Llama(
            str(file), n_ctx=positions, n_batch=_BATCH, n_threads=cores, n_threads_batch=cores,
            verbose=False,
        )  # fmt: skip
        self._batch = self._api.llama_batch_init(_BATCH, 0, 1)
        self.text: list[int] = []
        """What is in the cache."""

    def close(self) -> None:
        """Frees its memory."""
        self._api.llama_batch_free(self._batch)
        self._model.close()

    def cut(self, length: int) -> None:
        """Forgets what comes after so many tokens."""
        memory = self._api.llama_get_memory(self._model.ctx)
        self._api.llama_memory_seq_rm(memory, 0, length, -1)
        del self.text[length:]

    def read(self, tokens: Sequence[int], every: bool = False) -> None:
        """Appends tokens to the text; the last pass has logits after its last token, or `every`."""
        for at in range(0, len(tokens), _BATCH):
            self._pass(tokens[at : at + _BATCH], every)

    def _pass(self, tokens: Sequence[int], every: bool) -> None:
        batch, start = self._batch, len(self.text)
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place] = token
            batch.pos[place] = start + place
            batch.seq_id[place][0] = 0
            batch.n_seq_id[place] = 1
            batch.logits[place] = every
        batch.logits[len(tokens) - 1] = True
        if code := self._api.llama_decode(self._model.ctx, batch):
            raise ValueError(
                f"llama.cpp cannot read {len(tokens)} tokens: llama_decode gave {code}."
            )
        self.text += tokens

    def sample(self, sampler: Any, place: int = -1) -> int:
        """A token after that at a place of the last pass."""
        return self._api.llama_sampler_sample(sampler, self._model.ctx, place)

    def sampler(self, temperature: float, seed: int) -> Any:
        """Of the whole distribution at a temperature; `free` it."""
        api = self._api
        chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        if temperature:
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(temperature))
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(seed))
        else:
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_greedy())
        return chain

    def free(self, sampler: Any) -> None:
        """Frees a sampler."""
        self._api.llama_sampler_free(sampler)


class ModelDrafts:
    """A draft model that proposes its likeliest tokens.

    Args:
      session: of the draft.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._greedy = session.sampler(0.0, 0)

    def __call__(self, text: Sequence[int], count: int) -> list[int]:
        """The tokens after a text, of which only what is new is read."""
        kept = min(common_prefix(self.session.text, list(text)), len(text) - 1)
        self.session.cut(kept)
        self.session.read(text[kept:])
        drafted: list[int] = []
        while len(drafted) < count:
            if drafted:
                self.session.read(drafted[-1:])
            drafted.append(self.session.sample(self._greedy))
        return drafted


def lookup_drafts(text: Sequence[int], count: int) -> list[int]:
    """The binding's own n-gram drafts (`LlamaPromptLookupDecoding`), of its default n-grams."""
    own: Any = importlib.import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
    return own(num_pred_tokens=count)(np.asarray(text, np.intc)).tolist()


class Theirs:
    """llama.cpp as a contestant.

    Args:
      name: in the table.
      session: of the target.
      drafts: what drafts for it; by default nothing.
      count: how many tokens are drafted at a time.
    """

    def __init__(
        self, name: str, session: Session, drafts: Drafts | None = None, count: int = 0
    ) -> None:
        self.name, self._session, self._drafts, self._count = name, session, drafts, count
        self.key: Json = {
            "by": "llama.cpp",
            "version": version(),
            "name": name,
            "target": session.digest,
            "draft": drafts.session.digest if isinstance(drafts, ModelDrafts) else None,
            "count": count,
        }

    def warm(self, text: Text, sampled: Sampled) -> None:
        """Nothing is compiled."""

    def run(self, text: Text, sampled: Sampled) -> Run:
        """Generates a text.

        Raises:
          ValueError: llama.cpp refuses it.
        """
        session, made, steps = self._session, [], 0
        sampler = session.sampler(sampled.temperature, 1)
        start = time.perf_counter()
        session.cut(0)
        session.read(text.tokens[:-1])
        last = text.tokens[-1]
        while len(made) < text.new_tokens:
            most = min(self._count, text.new_tokens - len(made) - 1)
            drafted = self._drafts([*text.tokens, *made], most) if self._drafts and most else []
            session.read([last, *drafted], every=True)
            found = self._kept(sampler, list(drafted))
            session.cut(len(session.text) - len(drafted) - 1 + len(found))
            made += found
            last, steps = made[-1], steps + 1
        seconds = time.perf_counter() - start
        session.free(sampler)
        return Run(made, seconds, steps)

    def _kept(self, sampler: Any, drafted: list[int]) -> list[int]:
        """Samples after the last pass, up to the first that was not drafted."""
        found: list[int] = []
        for place in range(len(drafted) + 1):
            found.append(self._session.sample(sampler, place))
            if drafted[place : place + 1] != found[-1:]:
                break
        return found
