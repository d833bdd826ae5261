"""GGUF files as specjax and transformers read them: logits, greedy tokens, perplexity, sizes.

python -m tests.gguf_peers FILE.gguf... --texts TEXTS.jsonl   # real files
python -m tests.gguf_peers --made                            # tiny ones, of every family and type

It needs torch, gguf and accelerate. transformers 5.24 reads no GGUF of OLMo-2, GPT-NeoX and most
mixtures; of others it ignores Llama 3's frequency factors, Qwen 3's size of heads, Gemma's caps and
query scale.
"""

import argparse
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import torch
import transformers

from specjax.checkpoints.gguf import types_in
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.load import load_model
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.models.quantized import quantized_as
from tests.conftest import tiny_model
from tests.gguf_files import DRAWN, write_gguf
from tests.pairs import generate
from tests.test_gguf import TOKENIZER, TYPES
from tests.test_parity import plain_pass

NEW, WINDOW = 64, 256
SIZES = {
    "vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "Llama": {}, "Qwen2": {}, "Qwen3": {"head_dim": 128}, "Phi3": {"pad_token_id": 0},
    "Gemma2": {"head_dim": 256, "sliding_window": 16}, "Gemma3Text": {"head_dim": 256},
    "GPT2": {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 64}, "Olmo2": {},
    "GPTNeoX": {},
    "Qwen3Moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 768,
                 "norm_topk_prob": True, "head_dim": 128},
}  # fmt: skip
"""By the names of transformers' classes, with what its reading of a file takes for granted."""


def theirs(file: Path):
    """The model as transformers reads it, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()


def logits_of(model, rows: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(rows)).logits.double().numpy()


def compared(file: Path, rows: np.ndarray, prompts: list[list[int]], new: int = NEW) -> dict:
    """What both make of rows of tokens, and of prompts with so many new tokens."""
    ours, other = load_model(file), theirs(file)
    first = logits_of(other, rows)
    second = np.asarray(plain_pass(ours, rows)[0]).astype(np.float64)
    made = generate(ours, None, prompts, max_new_tokens=new)
    equal = 0
    for prompt, tokens in zip(prompts, made.tokens, strict=True):
        text = list(prompt)
        for _ in range(new):
            text.append(int(logits_of(other, np.array([text]))[0, -1].argmax()))
        equal += text[len(prompt) :] == tokens.tolist()
    return {
        "file": file.name,
        "types": types_in(file),
        "packed": quantized_as(ours) or "none",
        "MiB": round(sum(leaf.nbytes for leaf in jax.tree.leaves(ours)) / 2**20, 1),
        "logits": float(np.abs(first - second).max() / np.abs(first).max()),
        "greedy": f"{equal} of {len(prompts)}",
        "perplexity": [round(perplexity(each, rows), 4) for each in (first, second)],
    }


def perplexity(logits: np.ndarray, rows: np.ndarray) -> float:
    kept = logits[:, :-1] - logits[:, :-1].max(-1, keepdims=True)
    losses = np.log(np.exp(kept).sum(-1)) - np.take_along_axis(kept, rows[:, 1:, None], 2)[..., 0]
    return float(np.exp(losses.mean()))


def made(folder: Path):
    """Tiny files: of every family that transformers reads, and of every type."""
    for name, more in FAMILIES.items():
        config = getattr(transformers, f"{name}Config")(**SIZES | more)
        torch.manual_seed(0)
        own = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        own.save_pretrained(folder / name)
        padding = {"tokenizer__ggml__padding_token_id": 0}
        yield write_gguf(folder / name, folder / f"{name}.gguf", **padding)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2}
    save_model(tiny_model(**sizes, head_dim=64, vocab_size=258), folder / "model", dtype="float32")
    for kind in TYPES:
        yield write_gguf(folder / "model", folder / f"{kind}.gguf", kind, **TOKENIZER)
    for kind in DRAWN:
        yield write_gguf(folder / "model", folder / f"{kind}.gguf", kind, **TOKENIZER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--texts", type=Path, help="a text a line, under text or prompt")
    parser.add_argument("--made", action="store_true", help="tiny files instead")
    asked = parser.parse_args()
    for file in asked.files:
        tokenizer = tokenizer_of(file)
        lines = asked.texts.read_text("utf-8").splitlines()
        found = [json.loads(line) for line in lines]
        ids = [tokenizer(each.get("text") or each["prompt"]).input_ids for each in found]
        rows = np.array([each[:WINDOW] for each in ids if len(each) >= WINDOW][:6])
        print(json.dumps(compared(file, rows, [row[:12].tolist() for row in rows])), flush=True)
    if asked.made:
        with tempfile.TemporaryDirectory() as name:
            for file in made(Path(name)):
                rows = np.random.default_rng(0).integers(1, 48, (2, 40))
                prompts = [row[:9].tolist() for row in rows]
                try:
                    found = compared(file, rows, prompts, 48)
                except (RuntimeError, ValueError, AssertionError) as error:  # its guesses of sizes
                    found = {"file": file.name, "refused": str(error).partition("\n")[0]}
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
