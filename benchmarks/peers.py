"""llama.cpp and transformers as contestants, on the same prompts in the same rounds."""

import contextlib
import hashlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from benchmarks import llama
from benchmarks.cells import Json
from benchmarks.export import expanded, write_gguf
from benchmarks.rounds import Contestant, Run, Sampled
from benchmarks.texts import Text
from specjax.checkpoints.pair import Pair
from specjax.measure.transformers_baseline import Peer, available
from specjax.models.quantized import PackedWeight
from specjax.models.transformer import Model

DRAFTED = (4, 8)
"""Tokens that llama.cpp drafts at a time with a draft model."""
LOOKED_UP = 10
"""The same of its n-gram drafts, the binding's default."""


def versions(some: Sequence[Contestant]) -> str:
    """The peers' versions and threads, as a sentence."""
    found: dict[str, object] = {}
    for each in some:
        if isinstance(each, llama.Theirs):
            found |= {"llama-cpp-python": each.key["version"], "its threads": os.cpu_count()}
        elif isinstance(each, Transformers):
            names = {"threads": "PyTorch's threads"}
            found |= {names.get(name, name): own for name, own in each.versions.items()}
    return f"Peers: {', '.join(f'{name} {own}' for name, own in found.items())}." if found else ""


class Transformers:
    """transformers as a contestant.

    Args:
      peer: its models.
      assisted: whether the draft proposes, at transformers' defaults.
    """

    def __init__(self, peer: Peer, assisted: bool) -> None:
        self._peer, self._assisted = peer, assisted
        self.name = "transformers, assisted" if assisted else "transformers, plain"
        self.versions: Json = dict(peer.versions)
        self.key: Json = {"by": "transformers", "assisted": assisted} | self.versions

    def warm(self, text: Text, sampled: Sampled) -> None:
        """Runs a few tokens: torch allocates what it needs."""
        self._peer.generate([text.tokens], 2, sampled.temperature, self._assisted)

    def run(self, text: Text, sampled: Sampled) -> Run:
        """Generates a text."""
        made = self._peer.generate(
            [text.tokens], text.new_tokens, sampled.temperature, self._assisted
        )
        return Run(made.outputs[0].tolist(), made.seconds)


@contextlib.contextmanager
def contestants(
    pair: Pair, file: Path | None, folder: Path
) -> Iterator[tuple[list[Contestant], list[str]]]:
    """The peers that can run here, and a sentence for each that cannot.

    Args:
      pair: the target and its drafts, of which the first drafts for peers.
      file: the target as a GGUF file; None for one that is written.
      folder: where models are written as GGUF files.
    """
    with contextlib.ExitStack() as stack:
        found: list[Contestant] = []
        missing: list[str] = []
        try:
            found += _llama(pair, file, folder, stack, missing)
        except ValueError as error:
            missing.append(f"llama.cpp is left out: {error}")
        if not available():
            missing.append("transformers is left out: PyTorch is not installed.")
        else:
            found += _transformers(pair, missing)
        yield found, missing


def _llama(
    pair: Pair, file: Path | None, folder: Path, stack: contextlib.ExitStack, missing: list[str]
) -> list[Contestant]:
    """Those of llama.cpp: plain, with its n-gram drafts, and with the exported draft.

    Raises:
      ValueError: the binding is not installed, or the target cannot be written as a GGUF file.
    """
    if not llama.available():
        raise ValueError("llama-cpp-python is not installed.")
    positions = min(pair.target.config.max_positions, 8192)
    session = _session(file or _exported(pair.target, pair, folder / "target.gguf"), positions)
    stack.callback(session.close)
    found: list[Contestant] = [
        llama.Theirs("llama.cpp, plain", session),
        llama.Theirs("llama.cpp, prompt lookup", session, llama.lookup_drafts, LOOKED_UP),
    ]
    if not pair.drafts:
        return found
    try:
        draft = _exported(pair.drafts[0], pair, folder / "draft.gguf")
    except ValueError as error:
        missing.append(f"llama.cpp with our draft is left out: {error}")
        return found
    own = _session(draft, min(positions, pair.drafts[0].config.max_positions))
    stack.callback(own.close)
    drafts = llama.ModelDrafts(own)
    return found + [
        llama.Theirs(f"llama.cpp, draft of {count}", session, drafts, count) for count in DRAFTED
    ]


def _session(file: Path, positions: int) -> llama.Session:
    return llama.Session(file, positions, digest_of(file))


def _exported(model: Model, pair: Pair, file: Path) -> Path:
    """A model written as a GGUF file.

    Raises:
      ValueError: it is none of those that can be written, or the package gguf is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("the package gguf is not installed.")
    write_gguf(model, pair.tokenizer, file)
    return file


def _transformers(pair: Pair, missing: list[str]) -> list[Contestant]:
    """Those of transformers, plain and assisted, with the same weights in the dtype computed in."""
    try:
        target = unpacked(pair.target)
        drafts = [expanded(unpacked(draft)) for draft in pair.drafts[:1]]
        peer = Peer(target, *(as_dtype(draft, target) for draft in drafts))
    except (ValueError, TypeError, KeyError, RuntimeError, ImportError) as error:
        first = str(error).partition("\n")[0]
        missing.append(f"transformers is left out: it cannot hold these weights ({first}).")
        return []
    return [Transformers(peer, assisted) for assisted in (False, True)[: 1 + len(drafts)]]


def unpacked(model: Model) -> Model:
    """A model whose packed matrices are the float32 ones that they stand for.

    Raises:
      ValueError: a matrix has its inputs in an order of its own.
    """

    def whole(leaf: jax.Array | PackedWeight) -> jax.Array:
        if not isinstance(leaf, PackedWeight):
            return leaf
        if leaf.order is not None:
            raise ValueError("the inputs of a packed matrix are in an order of their own")
        return leaf.unpacked().astype(leaf.dtype)

    return jax.tree.map(whole, model, is_leaf=lambda leaf: isinstance(leaf, PackedWeight))


def as_dtype(model: Model, other: Model) -> Model:
    """A model with its matrices in the dtype of another's."""
    dtype = other.embedding.dtype
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, model)


def digest_of(file: Path) -> str:
    """A number that changes with what a file holds."""
    with file.open("rb") as held:
        return hashlib.file_digest(held, "sha256").hexdigest()[:16]
