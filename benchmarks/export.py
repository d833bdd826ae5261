"""Our models as other programs read them: whole vocabularies, and GGUF files."""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from specjax.base.pytree import replace
from specjax.models.quantized import PackedWeight, quantized_as, widened
from specjax.models.transformer import Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_NAMES = {
    "attention_norm": "attn_norm", "query": "attn_q", "key": "attn_k", "value": "attn_v",
    "output": "attn_output", "mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up",
    "down": "ffn_down",
}  # fmt: skip
"""What llama.cpp calls the leaves of a layer."""


def expanded(model: Model) -> Model:
    """A draft of a pruned vocabulary with tables of all tokens; any other model as it is.

    Logits of the tokens that it knows stay what they are. Of each other token the logit becomes the
    mean of those: its row of the output is the mean of the known ones' rows, and logits are linear
    in rows. A mean is never above the largest, so a token that the draft does not know is never
    the likeliest, wherever the hidden state points; a row of zeros would be where all known logits
    are negative. As input each is read as the draft's row for all other tokens, so both tables
    differ and outputs are no longer tied.

    Raises:
      ValueError: its tables are quantized.
    """
    known = model.config.draft_vocab_size
    if model.row_of is None or known is None:
        return model
    inputs = model.embedding
    outputs = inputs if model.unembedding is None else model.unembedding
    if isinstance(inputs, PackedWeight) or isinstance(outputs, PackedWeight):
        raise ValueError("tables that are quantized are not expanded.")
    mean = outputs[:known].astype(jnp.float32).mean(axis=0, keepdims=True).astype(outputs.dtype)
    outputs = jnp.concatenate([outputs[:known], mean])
    config = dataclasses.replace(
        model.config, draft_vocab_size=None, tie_embeddings=False, num_known=None
    )
    return replace(
        model,
        embedding=inputs[model.row_of],
        unembedding=outputs[model.row_of],
        row_of=None,
        config=config,
    )


def write_gguf(model: Model, tokenizer: "PreTrainedTokenizerFast", file: Path) -> None:
    """Writes a model of LLaMA's form as llama.cpp reads it; norms are float32.

    Args:
      model: in float32 or bfloat16; a draft of a pruned vocabulary is `expanded`.
      tokenizer: the model's, or its target's: byte-level BPE.
      file: what is written.

    Raises:
      ValueError: the model is of another family or quantized, or the tokenizer is another kind.
      ModuleNotFoundError: the package gguf is not installed.
    """
    gguf: Any = importlib.import_module("gguf")
    model = expanded(widened(model))
    _check(model, tokenizer)
    writer = gguf.GGUFWriter(file, "llama")
    _write_config(writer, model)
    _write_tokenizer(gguf, writer, model, tokenizer)

    def add(name: str, leaf: Any, heads: int = 0) -> None:
        tensor = np.asarray(leaf)
        if heads:  # rotated features lie side by side there, in halves of a head here
            halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
            tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
        if tensor.ndim > 1 and tensor.dtype == jnp.bfloat16:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(f"{name}.weight", tensor.view(np.uint8), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", tensor.astype(np.float32))

    config = model.config
    rotated = {"query": config.num_heads, "key": config.num_kv_heads}
    add("token_embd", model.embedding)
    add("output_norm", model.final_norm)
    if model.unembedding is not None:
        add("output", model.unembedding)
    for index, layer in enumerate(model.layers):
        for leaf, name in _NAMES.items():
            add(f"blk.{index}.{name}", getattr(layer, leaf), rotated.get(leaf, 0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check(model: Model, tokenizer: "PreTrainedTokenizerFast") -> None:
    config = model.config
    if config.family != "llama" or config.biases or config.rope_stretch is not None:
        raise ValueError(
            f"a model of the family {config.family} is not written as GGUF; only LLaMA's form "
            "without biases and rope scaling is."
        )
    if (form := quantized_as(model)) is not None:
        raise ValueError(f"the model is quantized ({form}); only float32 and bfloat16 are written.")
    if not isinstance(
        json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("merges"), list
    ):
        raise ValueError("the tokenizer is no byte-level BPE, and is not written as GGUF.")


def _write_config(writer: Any, model: Model) -> None:
    config = model.config
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)


def _write_tokenizer(
    gguf: Any, writer: Any, model: Model, tokenizer: "PreTrainedTokenizerFast"
) -> None:
    """The pre-tokenizer is always said to be GPT-2's, as prompts are given as tokens."""
    numbers = range(model.config.vocab_size)
    known = {number: token for token, number in tokenizer.get_vocab().items()}
    special, kinds = set(tokenizer.all_special_ids), gguf.TokenType
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    ends = model.config.eos_ids or (tokenizer.eos_token_id or 0,)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([known.get(number, f"<unused {number}>") for number in numbers])
    writer.add_token_types([
        kinds.CONTROL if number in special else kinds.NORMAL if number in known else kinds.UNUSED
        for number in numbers
    ])  # fmt: skip
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(ends[0])
    writer.add_eos_token_id(ends[0])
    writer.add_add_bos_token(False)
