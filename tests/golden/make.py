"""Rebuilds the golden files of test_parity.py with Hugging Face transformers.

Needs torch, which the tests themselves do not:
  pip install torch transformers safetensors numpy && python tests/golden/make.py
The committed files: torch 2.13.0 (CPU), transformers 5.23.0, float32, eager attention.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
BASE = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 0,
}
CASES = {
    # Query heads per key/value head 3, heads wider than hidden / heads, tied.
    "grouped_tied": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    },
    # One key/value head, another rotary base, several end tokens, sharded file.
    "single_kv_untied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        "eos_token_id": [3, 7],
    },
    # Plain multi-head attention, every optional key at its default.
    "plain": {"num_attention_heads": 3},
}


def make(name: str, changes: dict) -> None:
    torch.manual_seed(len(name))
    config = LlamaConfig(**(BASE | changes), attn_implementation="eager")
    model = LlamaForCausalLM(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():  # the initial 0.02 would hide errors
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    model.tie_weights()
    tokens = torch.randint(0, config.vocab_size, (2, 19))
    with torch.no_grad():
        logits = model(tokens).logits
    shards = "20KB" if "untied" in name else "1GB"
    model.save_pretrained(HERE / name, max_shard_size=shards)
    np.savez_compressed(HERE / f"{name}.npz", tokens=tokens.numpy(), logits=logits.numpy())


if __name__ == "__main__":
    for case, options in CASES.items():
        make(case, options)
