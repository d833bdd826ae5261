"""A tiny pair in folders, with a byte-level tokenizer of its own, for tests of the command line."""

import functools
import json
import tempfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specjax.__main__ import main
from specjax.checkpoints import huggingface
from tests.conftest import tiny_model

VOCABULARY = 272
END = "<|endoftext|>"


def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE of a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def add(a, b):\n    return a + b\n"] * 40, trainer)
    return tokenizer


def target_folder(folder: Path, seed: int, **changes: int) -> Path:
    """Writes a tiny target of several layers, with the vocabulary of `pair_folder`'s drafts."""
    model = tiny_model(seed, **({"vocab_size": VOCABULARY, "max_positions": 256} | changes))
    huggingface.save_model(model, folder, tokenizer=byte_tokenizer(), dtype="float32")
    return folder


@functools.cache
def pair_folder() -> Path:
    """A folder with `target`, and drafts `one` (the target itself) and `two` (another model)."""
    folder = Path(tempfile.mkdtemp(prefix="specjax-pair-"))
    sizes = {"vocab_size": VOCABULARY, "max_positions": 256, "num_layers": 1}
    target = tiny_model(0, **sizes)
    other = tiny_model(1, **sizes)
    for name, model in {"target": target, "one": target, "two": other}.items():
        huggingface.save_model(model, folder / name, tokenizer=byte_tokenizer(), dtype="float32")
    return folder


def pair_flags() -> list[str]:
    """The flags that name the pair."""
    folder = pair_folder()
    return ["--model", f"{folder}/target", "--draft", f"{folder}/one,{folder}/two"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    """What a verb prints with `--json` about the pair."""
    capsys.readouterr()
    assert main([*arguments, *pair_flags(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache folder that holds no measurement; compiled programs are not kept."""
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("specjax.methods.records.use_compilation_cache", lambda: None)
