"""Experts as DeepSeek-V3 has them (arXiv 2412.19437), which other families took over."""

from collections.abc import Mapping

from specjax.models.config import Experts, ModelConfig
from specjax.models.families.family import Json, first_of

ROUTED: Mapping[str, str] = {
    "router": "mlp.gate.weight",
    "correction_bias": "mlp.gate.e_score_correction_bias",
    "expert_gate": "mlp.experts.{expert}.gate_proj.weight",
    "expert_up": "mlp.experts.{expert}.up_proj.weight",
    "expert_down": "mlp.experts.{expert}.down_proj.weight",
    "gate": "mlp.shared_experts.gate_proj.weight",
    "up": "mlp.shared_experts.up_proj.weight",
    "down": "mlp.shared_experts.down_proj.weight",
}
"""Leaves of a layer with experts."""

_GROUP_BEST = 2
_NEEDED = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")


def routed(config: Json, dense: int, norm_topk: bool = True) -> Experts:
    """The experts that a file names; the first `first_k_dense_replace` layers (or `dense`) have
    none.

    Raises:
      ValueError: it names no experts, or more layers without than there are.
    """
    for key in _NEEDED:
        if config.get(key) is None:
            raise ValueError(f"the configuration has no {key!r}, which mixtures need.")
    first, layers = (
        first_of(config.get("first_k_dense_replace"), dense),
        config["num_hidden_layers"],
    )
    if first > layers:
        raise ValueError(f"first_k_dense_replace is {first}; there are {layers} layers.")
    size, groups = config["moe_intermediate_size"], first_of(config.get("n_group"), 1)
    return Experts(
        num_experts=config["n_routed_experts"],
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=size,
        scores="sigmoid",
        norm_topk=first_of(config.get("norm_topk_prob"), norm_topk),
        routed_scale=float(first_of(config.get("routed_scaling_factor"), 1.0)),
        correction_bias=True,
        num_groups=groups,
        topk_groups=first_of(config.get("topk_group"), 1),
        group_best=1 if groups == 1 else _GROUP_BEST,
        shared_size=size * first_of(config.get("n_shared_experts"), 0),
        dense_layers=tuple(range(first)),
    )


def written_routed(config: ModelConfig) -> Json:
    """The keys that `routed` reads."""
    experts = config.experts
    assert experts is not None
    return {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.norm_topk,
        "routed_scaling_factor": experts.routed_scale,
        "n_group": experts.num_groups,
        "topk_group": experts.topk_groups,
        "n_shared_experts": experts.shared_size // experts.intermediate_size,
        "first_k_dense_replace": len(experts.dense_layers),
    }
