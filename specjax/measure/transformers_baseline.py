"""Hugging Face's own generation over the very same weights, to measure beside ours.

PyTorch is asked for only here, and only when it is used.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import huggingface
from specjax.models import families
from specjax.models.transformer import Model


class Generated(NamedTuple):
    """Generated tokens of every prompt, and the seconds of all."""

    outputs: list[np.ndarray]
    seconds: float


def available() -> bool:
    """Whether PyTorch can be imported."""
    return importlib.util.find_spec("torch") is not None


class Peer:
    """A target, and a draft as its assistant, as transformers' models that share our arrays.

    A GPU array is handed over where it lies; nothing is copied.

    Raises:
      ModuleNotFoundError: PyTorch is not installed.
    """

    def __init__(self, target: Model, draft: Model | None = None) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.device = "cpu" if jax.default_backend() == "cpu" else "cuda"
        if self.device == "cpu":
            self.torch.set_num_threads(os.cpu_count() or 1)
        self.target = self._module(target)
        self.draft = None if draft is None else self._module(draft)

    @property
    def versions(self) -> dict[str, Any]:
        """What its times depend on beside the machine."""
        names = ("torch", "transformers")
        versions = {name: importlib.metadata.version(name) for name in names}
        return versions | {"threads": self.torch.get_num_threads()}

    def _module(self, model: Model) -> Any:
        """A model of transformers that holds the arrays of `model`."""
        torch, transformers = self.torch, importlib.import_module("transformers")
        config = transformers.AutoConfig.for_model(**families.write_config(model.config))
        config.eos_token_id = None  # a text runs to its length
        dtype = getattr(torch, model.embedding.dtype.name)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(self.device):
                module = transformers.AutoModelForCausalLM.from_config(config)
        finally:
            torch.set_default_dtype(before)
        weights = {
            name: torch.utils.dlpack.from_dlpack(jnp.asarray(leaf))
            for name, leaf in huggingface.named_tensors(model)
        }
        outer = families.FAMILIES[model.config.family].outer
        weights.setdefault(outer["unembedding"], weights[outer["embedding"]])
        module.load_state_dict(weights, assign=True)
        module.tie_weights()
        return module.eval()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        temperature: float = 0.0,
        assisted: bool = False,
    ) -> Generated:
        """Every prompt's continuation by itself, of exactly `max_new_tokens` tokens.

        `assisted` lets the draft propose (transformers' assisted generation, at its defaults).
        """
        torch, outputs = self.torch, []
        options: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature:
            options |= {"temperature": temperature, "top_k": 0}
        if assisted:
            options["assistant_model"] = self.draft
        torch.manual_seed(0)
        begin = time.perf_counter()
        for prompt in prompts:
            tokens = torch.tensor([list(prompt)], device=self.device)
            with torch.no_grad():
                made = self.target.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=max_new_tokens,
                    pad_token_id=0,
                    **options,
                )
            outputs.append(made[0, len(prompt) :].cpu().numpy())
        return Generated(outputs, time.perf_counter() - begin)
