"""transformers and accelerate's disk offload over the files that `benchmarks.offload.disk` reads.

    pip install torch transformers accelerate        # in an environment of its own
    python -m benchmarks.offload.accelerate_disk folder --resident 4

Plain greedy steps of the model with its first layers in memory and the others on disk. Those files
are mapped, and the system would keep what it read: after each step they are dropped from its cache
(`--keep-cache` leaves them there). It imports nothing of specjax.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
import transformers

from benchmarks.system import forget


def placed(config: transformers.PreTrainedConfig, resident: int) -> dict[str, str]:
    """Where each part of a Llama model is."""
    outer = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    layers = {
        f"model.layers.{number}": "cpu" if number < resident else "disk"
        for number in range(config.num_hidden_layers)
    }
    return dict.fromkeys(outer, "cpu") | layers


@torch.inference_mode()
def main() -> None:
    """Prints the seconds of each step, and their median."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("folder", type=Path)
    asked.add_argument("--resident", type=int, default=0, help="layers in memory")
    asked.add_argument("--steps", type=int, default=6)
    asked.add_argument("--threads", type=int, default=2)
    asked.add_argument("--prompt", default="def fibonacci(n):")
    asked.add_argument("--keep-cache", action="store_true")
    options = asked.parse_args()
    torch.set_num_threads(options.threads)
    config = transformers.AutoConfig.from_pretrained(options.folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.folder)
    with tempfile.TemporaryDirectory() as spare:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options.folder, dtype=torch.bfloat16, device_map=placed(config, options.resident),
            offload_folder=spare,
        )  # fmt: skip
        tokens = tokenizer(options.prompt, return_tensors="pt").input_ids
        cache, taken, made = None, [], []
        for _ in range(options.steps + 1):
            if not options.keep_cache:
                forget(options.folder.glob("*.safetensors"))
            start = time.perf_counter()
            out = model(tokens, past_key_values=cache, use_cache=True)
            taken.append(time.perf_counter() - start)
            cache = out.past_key_values
            tokens = out.logits[:, -1:].argmax(dim=-1)
            made.append(int(tokens))
    print(tokenizer.decode(made))
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "prompt_seconds": taken[0],
                "step_seconds": taken[1:],
                "median_step_seconds": statistics.median(taken[1:]),
                "cache_dropped": not options.keep_cache,
            }
        )
    )


if __name__ == "__main__":
    main()
