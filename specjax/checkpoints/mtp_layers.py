"""A model's layer of multi-token prediction as the draft for it (DeepSeek-V3, arXiv 2412.19437)."""

from jax.sharding import Mesh

from specjax.base.pytree import replace
from specjax.checkpoints.feature_drafts import loaded
from specjax.checkpoints.files import CheckpointError, Files, tensors
from specjax.models.families.mimo import MTP, mtp_config
from specjax.models.transformer import Model

MTP_DRAFT = "self:mtp"
"""What `--draft` calls such a draft."""


def mtp_draft(
    files: Files, target: Model, *, dtype: str | None = None, mesh: Mesh | None = None
) -> Model:
    """The layer in a target's files; embedding, unembedding and the norm before it are shared.

    Raises:
      CheckpointError: the files have none, or not all of it.
      ValueError: models of that family have none that is supported.
    """
    config = mtp_config(target.stored_config)
    family = MTP[target.config.family]
    prefix = family.layer_prefix
    if not any(name.startswith(prefix) for name, _, _ in tensors(files)):
        raise CheckpointError(f"{files.path} has no tensor {prefix}*, which {MTP_DRAFT} is.")
    made = loaded(files, config, family, target, dtype=dtype, mesh=mesh)
    return replace(made, feature_input_norm=target.final_norm)
