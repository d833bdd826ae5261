"""MiMo (Xiaomi, arXiv 2505.07608): Qwen 2 with a layer of multi-token prediction behind it."""

import dataclasses

from specjax.models.config import INPUT, Features, ModelConfig
from specjax.models.families.llama import LLAMA, QWEN2

_PREFIX = "model.mtp_layers.0."

MIMO = dataclasses.replace(
    QWEN2,
    model_type="mimo",
    architecture="MiMoForCausalLM",
    ignored=(*QWEN2.ignored, "model.mtp_layers."),
)

MIMO_MTP = dataclasses.replace(
    LLAMA,
    model_type="mimo_mtp",
    architecture="MiMoMTPModel",
    outer={
        "final_norm": f"{_PREFIX}final_layernorm.weight",
        "feature_projection": f"{_PREFIX}input_proj.weight",
        "feature_norm": f"{_PREFIX}hidden_layernorm.weight",
        "feature_token_norm": f"{_PREFIX}token_layernorm.weight",
    },
    layer_prefix=_PREFIX,
    base="",
    ignored=(*LLAMA.ignored, "model.embed_tokens.", "model.layers.", "model.norm.", "lm_head."),
)
"""The layer in the model's own files; what else is there is the model's."""

MTP = {MIMO.model_type: MIMO_MTP}
"""Families of models that may have such a layer, and the layer's table."""


def mtp_config(target: ModelConfig) -> ModelConfig:
    """The configuration of a target's layer of multi-token prediction.

    It reads the target's last hidden state, normed as before the target's unembedding; below a node
    its own output stands there, normed by its last norm.

    Raises:
      ValueError: models of that family have none that is known here.
    """
    if target.family not in MTP:
        raise ValueError(
            f"a {target.family} model has no layer of multi-token prediction that is supported "
            f"here; models of {', '.join(MTP)} may."
        )
    read = Features(
        layers=(target.num_layers,),
        size=target.hidden_size,
        norms="whole",
        normed_output=True,
        shares_unembedding=True,
        way=INPUT,
    )
    return dataclasses.replace(
        target, num_layers=1, windows=(), tie_embeddings=False, features=read, eos_ids=(),
        family=MTP[target.family].model_type,
    )  # fmt: skip
