"""What `tests.fuzz` mutates, and how it is read: as the command line reads it."""

import functools
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load, save

from specjax.__main__ import main
from specjax.checkpoints import huggingface
from specjax.checkpoints.load import load as load_folder
from specjax.checkpoints.load import load_model
from specjax.checkpoints.ngram_files import load_ngram, save_ngram
from specjax.checkpoints.pair import Pair, load_pair
from specjax.checkpoints.tokenizers import ids_of_talk
from specjax.decoding.generate import generate
from specjax.decoding.request import prepare
from specjax.measure import prompts
from specjax.methods import records, registry, tuned
from specjax.methods.choice import Asked, choose
from specjax.methods.records import Measured, Run
from specjax.methods.tuned import Entry
from tests.folders import pair_folder
from tests.fuzz import BAIT, CANARY, Guard, Kind
from train.chunks import load_chunks

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = ("plain", "gemma2", "gemma3", "gpt2", "opt", "neox", "phi3_long", "qwen2_windows",
            "llama_yarn", "mistral_layers", "olmo2", "qwen3")  # fmt: skip
TEXTS = ["def add(a, b):", "return a", "", "naïve"]
KEY = jax.random.key(0)
Files = dict[str, bytes]


def kinds(guard: Guard) -> list[Kind]:
    """All kinds, with everything imported and loaded that they read with."""
    guard.readable.append(pair_folder())
    bait = guard.bait
    target = held(pair_folder() / "target")
    target["generation_config.json"] = b'{"eos_token_id": [0, 3]}'
    config = json.loads(target["tokenizer_config.json"])
    config["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    target["tokenizer_config.json"] = json.dumps(config).encode()
    (bait / BAIT).write_bytes(target["model.safetensors"])
    evil = f"open({str(bait / CANARY)!r}, 'w')\n".encode()
    target |= {"evil.py": evil, "tokenization_evil.py": evil, "modeling_llama.py": evil}
    del config
    found = [
        Kind("folder", 5, lambda rng, _: dict(target), read_folder),
        Kind("family", 4, lambda rng, _: held(GOLDEN / rng.choice(FAMILIES)), read_family),
        Kind("draft", 2, lambda rng, _: dict(target), read_draft),
        Kind("shards", 1, lambda rng, _: sharded(target), read_folder),
        Kind("pickle", 1, functools.partial(pickled, target), read_family),
        Kind("orbax", 0.3, lambda rng, _: dict(orbax()), read_family),
        Kind("ngram", 2, lambda rng, _: dict(ngram()), read_ngram),
        Kind("config", 3, lambda rng, _: dict(tuned_file()), read_config),
        Kind("records", 3, lambda rng, _: dict(measured()), read_records),
        Kind("prompts", 3, lambda rng, _: dict(prompt_lines()), read_prompts),
        Kind("chunk", 1, lambda rng, _: dict(chunk()), read_chunk),
    ]
    for kind in found:  # what is imported late is imported now
        warm(kind)
    return found


def warm(kind: Kind) -> None:
    """Reads a kind's files as they are, in a folder of their own."""
    import tempfile

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        for path, content in kind.files(rng, Path(name) / "nowhere").items():
            (Path(name) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(name) / path).write_bytes(content)
        try:
            kind.read(Path(name), rng)
        except ValueError:
            if kind.name != "pickle":  # which is hostile, or torch is not installed
                raise


def held(folder: Path) -> Files:
    """A folder's files."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def sharded(target: Files) -> Files:
    """The folder with its weights in two files and an index."""
    tensors = load(target["model.safetensors"])
    files, index = dict(target), {}
    del files["model.safetensors"]
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        file = f"model-{number}.safetensors"
        files[file] = save({name: tensors[name] for name in names}, {"format": "pt"})
        index |= dict.fromkeys(names, file)
    files["model.safetensors.index.json"] = json.dumps({"weight_map": index}).encode()
    return files


class _Payload:
    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (self.file, "w")


def pickled(target: Files, rng: np.random.Generator, bait: Path) -> Files:
    """The folder with a pickle for weights that would write a file when it is read."""
    files = dict(target)
    del files["model.safetensors"]
    payload = pickle.dumps({"model.norm.weight": _Payload(str(bait / CANARY))}, 2)
    if rng.random() < 0.5:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("archive/data.pkl", payload)
            archive.writestr("archive/version", "3\n")
        payload = packed.getvalue()
    return files | {"pytorch_model.bin": payload}


@functools.cache
def orbax() -> Files:
    """A folder of shards by Orbax."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        model = load_model(pair_folder() / "target")
        huggingface.save_sharded(model, Path(name) / "kept")
        return held(Path(name) / "kept")


@functools.cache
def ngram() -> Files:
    """A small n-gram folder."""
    import tempfile

    from tests.test_methods import TABLE

    with tempfile.TemporaryDirectory() as name:
        save_ngram(TABLE, name)
        return held(Path(name))


SETTINGS = [
    *(registry.setting_of(name) for name in ("none", "chain", "tree", "specexec", "lookup")),
    *(registry.setting_of(name) for name in ("pool", "recycle")),
]


def tuned_file() -> Files:
    """A file as tune writes it."""
    import tempfile

    figures = {"tokens_per_step": 2.5, "speedup": 1.5}
    entries = [Entry(t, 1, one, figures, figures) for one in SETTINGS for t in (0.0, 0.8)]
    with tempfile.TemporaryDirectory() as name:
        tuned.write(Path(name) / "tuned.json", entries, {"cpu": "x"})
        return held(Path(name))


def measured() -> Files:
    """A file of measurements of the pair that `choose` is asked about."""
    entries = tuple(Measured(one, 10.0 + n, (1.0 + n,) * 4) for n, one in enumerate(SETTINGS))
    runs = [Run("2026-11-23", t, 8, entries) for t in (0.0, 0.8)]
    written = [records._written(run) for run in runs]
    names = [records.setting(pair().target, pair().drafts, 1, sampled) for sampled in (False, True)]
    return {"measured.json": json.dumps(dict.fromkeys(names, written)).encode()}


def prompt_lines() -> Files:
    """Lines of prompts."""
    lines = [{"id": n, "prompt": text} for n, text in enumerate(TEXTS)]
    several = {"id": "many", "turns": TEXTS}
    return {"prompts.jsonl": "\n".join(map(json.dumps, [*lines, several])).encode()}


def chunk() -> Files:
    """A chunk of training data."""
    packed = io.BytesIO()
    np.savez_compressed(packed, tokens=np.arange(64), log_q=np.zeros((8, 8), np.float16))
    return {"00000.npz": packed.getvalue()}


@functools.cache
def pair() -> Pair:
    """A tiny pair."""
    return load_pair(str(pair_folder() / "target"), str(pair_folder() / "one"))


def read_folder(folder: Path, rng: np.random.Generator) -> None:
    """A model and its tokenizer, and a request of them."""
    if rng.random() < 0.1:
        cli("info", "--model", str(folder))
    model, tokenizer = load_folder(folder)
    ids = tokenizer("def add(a, b):").input_ids
    prepare(KEY, model, None, [ids], max_new_tokens=4)
    if rng.random() < 0.01:
        ids = generate(KEY, model, None, [ids], max_new_tokens=4).tokens[0].tolist()
    tokenizer.decode(ids)
    if tokenizer.chat_template:
        ids_of_talk(tokenizer, [{"role": "user", "content": "def add(a, b):"}])


def read_draft(folder: Path, rng: np.random.Generator) -> None:
    """A draft for a target that is whole."""
    if rng.random() < 0.1:
        cli("check-pair", str(pair_folder() / "target"), str(folder))
    load_pair(str(pair_folder() / "target"), str(folder))


def read_family(folder: Path, rng: np.random.Generator) -> None:
    """A model without a tokenizer."""
    prepare(KEY, load_model(folder), None, [[1, 2, 3]], max_new_tokens=4)


def read_ngram(folder: Path, rng: np.random.Generator) -> None:
    """An n-gram model."""
    load_ngram(folder)


def read_config(folder: Path, rng: np.random.Generator) -> None:
    """A file for `--config`."""
    for temperature in (0.0, 0.8):
        choice = choose(Asked(config=str(folder / "tuned.json")), pair(), temperature)
        registry.build(choice.setting, pair())


def read_records(folder: Path, rng: np.random.Generator) -> None:
    """Measurements, which are never refused."""
    for temperature in (0.0, 0.5):
        try:
            choice = choose(Asked(), pair(), temperature)
        except ValueError as error:
            raise AssertionError(f"measurements were refused: {error}") from error
        registry.build(choice.setting, pair())


def read_prompts(folder: Path, rng: np.random.Generator) -> None:
    """Prompts to measure on, tokenized."""
    listed = prompts.read(str(folder / "prompts.jsonl"))
    prompts.fitting(listed, pair().tokenizer, 256, 4)


def read_chunk(folder: Path, rng: np.random.Generator) -> None:
    """A chunk of training data."""
    load_chunks("labels", folder, 1)


def cli(*arguments: str) -> None:
    """Runs a command: what it refuses is one line on standard error, and its code 2.

    1 is check-pair's no.
    """
    import contextlib

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(arguments)
    lines = [line for line in said.getvalue().splitlines() if line.startswith("specjax: ")]
    assert code in (0, 1) or (code == 2 and len(lines) == 1), (code, said.getvalue())
