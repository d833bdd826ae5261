"""What 8 and 4 bits change of a model: bits a byte of text, and how often the likeliest token is
another one.

    specjax quantize bundled eight --bits 8
    specjax quantize bundled four --bits 4
    python -m tests.quantized_quality humaneval.jsonl bundled eight four
"""

import dataclasses

import numpy as np
import tyro

import specjax
from specjax.measure import prompts
from specjax.measure.distribution_tests import logits_within
from specjax.models.quantized import quantized_as


@dataclasses.dataclass(frozen=True)
class Quality:
    """What is compared."""

    file: tyro.conf.Positional[str]
    """Of prompts, whose text is what is scored."""
    models: tyro.conf.Positional[tuple[str, ...]]
    """Folders; the first is what the others are held against."""
    limit: int = 82
    """Take this many prompts only."""
    dtype: str = "float32"
    """What is computed in."""


def main() -> None:
    """Prints a line for each model."""
    asked = tyro.cli(Quality)
    first: list[np.ndarray] = []
    for name in asked.models:
        model, tokenizer = specjax.load(name, dtype=asked.dtype)
        bits, size, tokens, equal = 0.0, 0, 0, 0
        for number, (_, text) in enumerate(prompts.read(asked.file)[: asked.limit]):
            ids = tokenizer(text).input_ids[: model.config.max_positions]
            logits = logits_within(model, [ids], np.arange(len(ids) - 1)[None])[0]
            logits = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
            surprise = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(ids) - 1), ids[1:]]
            bits += surprise.sum() / np.log(2)
            size += len(tokenizer.decode(ids[1:]).encode())
            likeliest = logits.argmax(axis=1)
            if name == asked.models[0]:
                first.append(likeliest)
            tokens, equal = tokens + len(likeliest), equal + int((likeliest == first[number]).sum())
        print(
            f"{name}: {quantized_as(model) or asked.dtype}; {bits / size:.4f} bits a byte, "
            f"{equal / tokens:.4f} of {tokens} likeliest tokens those of {asked.models[0]}"
        )


if __name__ == "__main__":
    main()
