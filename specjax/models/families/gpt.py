"""GPT-2, OPT and GPT-NeoX (Pythia): norms of mean and variance, biases, no gate."""

import dataclasses

from specjax.models.config import MATRICES, ModelConfig
from specjax.models.families import rotary
from specjax.models.families.family import Family, Json, Positions, whole_heads
from specjax.models.families.llama import LLAMA

_UNGATED = tuple(name for name in MATRICES if name != "gate")
_COMMON = {"norm": "layer", "gated": False}

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "norm_eps": "layer_norm_epsilon",
        "tie_embeddings": "tie_word_embeddings",
        "max_positions": "n_positions",
        "activation": "activation_function",
    },
    defaults={
        "vocab_size": lambda config: 50257,
        "n_embd": lambda config: 768,
        "n_inner": lambda config: 4 * config["n_embd"],
        "n_layer": lambda config: 12,
        "n_head": lambda config: 12,
        "layer_norm_epsilon": lambda config: 1e-5,
        "tie_word_embeddings": lambda config: True,
        "n_positions": lambda config: 1024,
        "activation_function": lambda config: "gelu_new",
    },
    fixed={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    outer={
        "embedding": "transformer.wte.weight",
        "position_embedding": "transformer.wpe.weight",
        "final_norm": "transformer.ln_f.weight",
        "unembedding": "lm_head.weight",
    },
    layer_prefix="transformer.h.{index}.",
    layer={
        "attention_norm": "ln_1.weight",
        "query key value": "attn.c_attn.weight",
        "output": "attn.c_proj.weight",
        "mlp_norm": "ln_2.weight",
        "up": "mlp.c_fc.weight",
        "down": "mlp.c_proj.weight",
    },
    packing="turned",
    ignored=(".attn.bias", ".attn.masked_bias"),
    base="transformer.",
    features=lambda config, positions: {
        **_COMMON,
        "biases": _UNGATED,
        "rotary_dim": 0,
        "position_offset": 0,
    },
    written=lambda config: {},
)


def _of_opt(config: Json, positions: Positions) -> Json:
    del positions
    if (config.get("word_embed_proj_dim") or config["hidden_size"]) != config["hidden_size"]:
        raise ValueError(
            f"word_embed_proj_dim is {config['word_embed_proj_dim']} and hidden_size "
            f"{config['hidden_size']}; embeddings that are projected are not supported here."
        )
    biases = _UNGATED if config.get("enable_bias", True) else ()
    own = {"norm_eps": 1e-5, "rotary_dim": 0, "position_offset": 2}  # no key says otherwise
    return {**_COMMON, **own, "biases": biases}


OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_dim",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "tie_embeddings": "tie_word_embeddings",
        "max_positions": "max_position_embeddings",
        "activation": "activation_function",
    },
    defaults={
        "tie_word_embeddings": lambda config: True,
        "max_position_embeddings": lambda config: 2048,
        "activation_function": lambda config: "relu",
    },
    fixed={
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "layer_norm_elementwise_affine": (True,),
    },
    outer={
        "embedding": "model.decoder.embed_tokens.weight",
        "position_embedding": "model.decoder.embed_positions.weight",
        "final_norm": "model.decoder.final_layer_norm.weight",
        "unembedding": "lm_head.weight",
    },
    layer_prefix="model.decoder.layers.{index}.",
    layer={
        "attention_norm": "self_attn_layer_norm.weight",
        "query": "self_attn.q_proj.weight",
        "key": "self_attn.k_proj.weight",
        "value": "self_attn.v_proj.weight",
        "output": "self_attn.out_proj.weight",
        "mlp_norm": "final_layer_norm.weight",
        "up": "fc1.weight",
        "down": "fc2.weight",
    },
    base="model.",
    features=_of_opt,
    written=lambda config: {
        "enable_bias": bool(config.biases),
        "word_embed_proj_dim": config.hidden_size,
    },
)


def _of_neox(config: Json, positions: Positions) -> Json:
    share = config.get("rotary_pct", 0.25)
    config = {**config, "head_dim": whole_heads(config)}
    biases = MATRICES[:4] * bool(config.get("attention_bias", True)) + ("up", "down")
    return {
        **_COMMON,
        **rotary.read(config, positions, config.get("rotary_emb_base", 10_000.0), share),
        "biases": biases,
        "parallel": config.get("use_parallel_residual", True),
    }


def _written_neox(config: ModelConfig) -> Json:
    made = rotary.write(config)
    share = made["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return {
        **made,
        "rotary_pct": share,
        "rotary_emb_base": config.rope_theta,
        "attention_bias": "query" in config.biases,
        "use_parallel_residual": config.parallel,
    }


NEOX = dataclasses.replace(
    LLAMA,
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    fields={
        **{field: LLAMA.fields[field] for field in LLAMA.fields
           if field not in ("num_kv_heads", "head_dim")},
        "norm_eps": "layer_norm_eps",
    },
    defaults={
        "layer_norm_eps": lambda config: 1e-5,
        "tie_word_embeddings": lambda config: False,
        "max_position_embeddings": lambda config: 2048,
        "hidden_act": lambda config: "gelu",
    },
    fixed={},
    outer={
        "embedding": "gpt_neox.embed_in.weight",
        "final_norm": "gpt_neox.final_layer_norm.weight",
        "unembedding": "embed_out.weight",
    },
    layer_prefix="gpt_neox.layers.{index}.",
    layer={
        "attention_norm": "input_layernorm.weight",
        "query key value": "attention.query_key_value.weight",
        "output": "attention.dense.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "up": "mlp.dense_h_to_4h.weight",
        "down": "mlp.dense_4h_to_h.weight",
    },
    packing="heads",
    ignored=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
    renamed={"lm_head.": "embed_out."},
    base="gpt_neox.",
    features=_of_neox,
    written=_written_neox,
)  # fmt: skip
