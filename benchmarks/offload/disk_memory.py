"""Memory of a streamed model of Llama-3.1-8B's shape, against the plan.

    python -m benchmarks.offload.disk_memory folder --layers 0 --budgets 15 255

Random weights in bfloat16, 16 GB, are written to the folder if it holds none: no text of them means
anything, but what they take does. Needs no other model.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tyro

from benchmarks.offload.disk import POLL_SECONDS, Bench, planned_bytes, room_of
from benchmarks.system import Peak, anonymous_bytes
from specjax.base.sampling import Sampling
from specjax.checkpoints.files import find
from specjax.checkpoints.offload.load import load_offloaded
from specjax.checkpoints.pair import Pair
from specjax.checkpoints.writing import new_model
from specjax.decoding.generate import begin, steps
from specjax.decoding.request import prepare
from specjax.methods import registry
from specjax.models.config import ModelConfig
from specjax.models.memory import readable
from specjax.models.transformer import initialize

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    "hidden_act": "silu", "eos_token_id": 128001, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Llama-3.1-8B's, without the stretch of its rotary frequencies."""
_POOL = 2**27


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is run."""

    folder: tyro.conf.Positional[str]
    """Of the model; it is written if there is none."""
    layers: int = 0
    """Of it in memory."""
    budgets: tuple[int, ...] = (15, 255)
    """Of best-first trees, at temperature 0."""
    steps: int = 2
    """Timed steps of each."""


def write(folder: Path) -> None:
    """Writes the model: every tensor is a piece of one pool of normal numbers."""
    drawn = np.random.default_rng(0)
    pool = (drawn.standard_normal(_POOL, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    hidden, inside, keys = 4096, 14336, 8 * 128
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inside, hidden), "mlp.up_proj": (inside, hidden),
        "mlp.down_proj": (hidden, inside),
    }  # fmt: skip

    def some(shape: tuple[int, ...]) -> np.ndarray:
        size = int(np.prod(shape))
        start = int(drawn.integers(0, _POOL))
        return np.take(pool, np.arange(start, start + size), mode="wrap").reshape(shape)

    ones = np.ones(hidden, ml_dtypes.bfloat16)
    with new_model(folder.parent, folder, CONFIG) as shards:
        shards.add("model.embed_tokens.weight", some((CONFIG["vocab_size"], hidden)))
        for layer in range(32):
            base = f"model.layers.{layer}"
            for name, shape in shapes.items():
                shards.add(f"{base}.{name}.weight", some(shape))
            for name in ("input_layernorm", "post_attention_layernorm"):
                shards.add(f"{base}.{name}.weight", ones)
        shards.add("model.norm.weight", ones)
        shards.add("lm_head.weight", some((CONFIG["vocab_size"], hidden)))


def measured(asked: Asked) -> dict[str, Any]:
    """Seconds of the steps, and the memory."""
    bench = Bench(model=asked.folder, prompts="", layers=asked.layers)
    model = load_offloaded(find(asked.folder), dtype="bfloat16", memory_bytes=room_of(bench))
    small = ModelConfig(
        vocab_size=CONFIG["vocab_size"], hidden_size=64, intermediate_size=128, num_layers=1,
        num_heads=2, num_kv_heads=2, head_dim=32, max_positions=8192,
    )  # fmt: skip
    draft = initialize(jax.random.key(0), small, jnp.dtype("bfloat16"))
    no_tokenizer: Any = None
    pair = Pair(model, no_tokenizer, [draft])
    rows, planned = {}, 0
    for name in ("none", *(f"specexec:{budget}" for budget in asked.budgets)):
        setting = registry.setting_of(name)
        request = prepare(
            jax.random.key(0), model, registry.build(setting, pair), [[1, 2, 3, 4]],
            max_new_tokens=64, sampling=Sampling(), stop_at_eos=False,
        )  # fmt: skip
        planned = max(planned, planned_bytes(request))
        taken, start = [], None
        for state, _ in steps(request, begin(request)):
            jax.block_until_ready(state.last)
            now = time.perf_counter()
            if start is not None:
                taken.append(now - start)
            start = now
            if len(taken) == asked.steps:
                break
        rows[name] = taken
        print(name, *(f"{each:.2f}" for each in taken), flush=True)
    return {
        "layers_in_memory": len(model.layers), "planned_bytes": planned,
        "held_bytes": model.held_bytes, "bytes_a_pass": model.bytes_a_pass, "steps": rows,
    }  # fmt: skip


def main() -> None:
    """Prints the most memory that was taken, and the plan."""
    asked = tyro.cli(Asked)
    folder = Path(asked.folder)
    if not (folder / "config.json").exists():
        write(folder)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
    before = anonymous_bytes()
    with Peak(POLL_SECONDS) as peak:
        found = measured(asked)
    print(json.dumps(found | {"peak_anonymous_bytes": peak.bytes}))
    print(
        f"{found['layers_in_memory']} of 32 layers in memory: at most {readable(peak.bytes)} of "
        f"anonymous memory ({readable(before)} before loading), planned "
        f"{readable(found['planned_bytes'])}: {peak.bytes / found['planned_bytes']:.3f}"
    )


if __name__ == "__main__":
    main()
