"""The pair that options name, and what drafts for it."""

from typing import Any

from jax.sharding import Mesh

from specjax.checkpoints.pair import Pair, load_pair
from specjax.cli.options import Context, Drafting, Loaded, Offloaded, Staged
from specjax.cli.values import bytes_of, widths_of
from specjax.methods.choice import Asked
from specjax.methods.method import listed
from specjax.methods.registry import ALL


def pair_of(options: Loaded, dtype: str | None, mesh: Mesh | None = None) -> Pair:
    """The pair that options name; what a verb has no option for is as `load_pair` has it.

    Args:
      options: of a verb.
      dtype: of the target's weights, "float32" or "bfloat16"; None is `load_pair`'s.
      mesh: the devices to lie on.

    Raises:
      CheckpointError: as `load_pair`.
      ValueError: an option is wrong, or the pair does not fit.
    """
    more: dict[str, Any] = {}
    if isinstance(options, Staged):
        more["stage"] = options.stage
    if isinstance(options, Context):
        more["positions"] = options.positions
    if isinstance(options, Offloaded):
        more |= {"offload": options.offload, "memory": bytes_of("--memory", options.memory)}
    return load_pair(
        options.model, options.draft, dtype=dtype, mesh=mesh, lora=options.lora,
        activations=options.activations, **more,
    )  # fmt: skip


def asked_of(options: Drafting) -> Asked:
    """The method and the rule that options name.

    Raises:
      ValueError: `--tree` is no tree's.
    """
    return Asked(
        options.method, widths_of(options.tree), options.budget, options.config, options.verify
    )


SERVED_TEMPERATURE = 0.8
"""For which `auto` takes a server's method: requests sample unless they ask for something else."""


def settings_named(text: str) -> tuple[str, ...]:
    """The names in a server's `--settings`; none for all that the pair can."""
    return () if text == ALL else tuple(listed(text))
