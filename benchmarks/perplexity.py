"""What 8 and 4 bits change of a model: its perplexity on texts, bits a byte of them, and how often
the likeliest token is another one.

    specjax quantize bundled eight --bits 8
    specjax quantize bundled four --bits 4
    python -m benchmarks.perplexity humaneval.jsonl bundled eight four --gguf four.Q4_0.gguf

A GGUF file is read as the weights that it stands for, with the first folder's configuration.
"""

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tyro

import specjax
from specjax.measure import prompts
from specjax.measure.distribution_tests import logits_within
from specjax.models.quantized import quantized_as


@dataclasses.dataclass(frozen=True)
class Quality:
    """What is compared."""

    files: tyro.conf.Positional[str]
    """Of prompts, whose text is what is scored; several separated by commas."""
    models: tyro.conf.Positional[tuple[str, ...]]
    """Folders; the first is what the others are held against."""
    gguf: tuple[str, ...] = ()
    """GGUF files of the same model."""
    limit: int = 82
    """Take this many prompts of each file only."""
    tokens: int = 512
    """Take this many tokens of each prompt only."""
    dtype: str = "float32"
    """What is computed in."""
    activations: tuple[str, ...] = ("float",)
    """What packed weights multiply: float, int8 or both."""


@contextmanager
def folder_of(gguf: str, tokenizer: Any) -> Iterator[str]:
    """A folder with the float32 weights that a GGUF file stands for."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    path = Path(gguf).resolve()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with tempfile.TemporaryDirectory(prefix="specjax-") as made:
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        yield made


class Scored:
    """What a model gives of the texts of a file."""

    def __init__(self, asked: Quality, file: str, model: Any, tokenizer: Any) -> None:
        self.likeliest: list[int] = []
        self.nats, self.size = 0.0, 0
        for _, text in prompts.read(file)[: asked.limit]:
            ids = tokenizer(text).input_ids[: min(model.config.max_positions, asked.tokens)]
            if len(ids) < 2:
                continue
            logits = logits_within(model, [ids], np.arange(len(ids) - 1)[None])[0]
            logits = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
            chosen = logits[np.arange(len(ids) - 1), ids[1:]]
            self.nats += (np.log(np.exp(logits).sum(axis=1)) - chosen).sum()
            self.size += len(tokenizer.decode(ids[1:]).encode())
            self.likeliest += logits.argmax(axis=1).tolist()

    @property
    def perplexity(self) -> float:
        """Of a token."""
        return float(np.exp(self.nats / len(self.likeliest)))

    def beside(self, first: "Scored") -> str:
        """A line of it."""
        equal = np.mean(np.asarray(self.likeliest) == np.asarray(first.likeliest))
        return (
            f"perplexity {self.perplexity:.3f} ({self.perplexity / first.perplexity:.4f}), "
            f"{self.nats / np.log(2) / self.size:.4f} bits a byte, likeliest tokens {equal:.4f} "
            f"of {len(self.likeliest)}"
        )


def main() -> None:
    """Prints a line for each model and file."""
    asked = tyro.cli(Quality)
    first: dict[str, Scored] = {}

    def score(name: str, folder: str, activations: str = "float") -> None:
        model, tokenizer = specjax.load(folder, dtype=asked.dtype, activations=activations)
        for file in asked.files.split(","):
            own = Scored(asked, file, model, tokenizer)
            line = own.beside(first.setdefault(file, own))
            print(f"{name} ({quantized_as(model) or asked.dtype}), {file}: {line}", flush=True)

    for name in asked.models:
        for activations in asked.activations:
            score(name, name, activations)
    for name in asked.gguf:
        with folder_of(name, specjax.load(asked.models[0])[1]) as made:
            score(name, made)


if __name__ == "__main__":
    main()
