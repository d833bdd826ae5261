"""The average of the weights of two heads (model soups, arXiv 2203.05482).

python -m train.average TARGET FOLDER HEAD OTHER --share 0.6

A head that was fine-tuned from another on few answers is better at these and may be worse
elsewhere; between the two lies one that is better than both. Packed weights are averaged as the
numbers that they stand for; the average is written in bfloat16.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.base.pytree import replace
from specjax.checkpoints.feature_drafts import load_feature_draft
from specjax.checkpoints.files import Files
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.pair import load_pair
from specjax.models.quantized import PackedWeight
from specjax.models.transformer import Model


def average(head: Model, other: Model, share: float) -> Model:
    """`share` of another head's weights with the rest of a head's, in float32.

    Raises:
      ValueError: they are not of one shape, or know other tokens.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"the share is {share}; it must lie from 0 to 1.")
    if head.config != other.config:
        raise ValueError(f"the heads differ: one is {head.config}, the other {other.config}.")

    def between(own: jax.Array, others: jax.Array) -> jax.Array:
        if jnp.issubdtype(own.dtype, jnp.floating):
            return (1 - share) * own + share * others
        if not np.array_equal(own, others):
            raise ValueError("the heads know other tokens.")
        return own

    return jax.tree.map(between, *map(_whole, (head, other)))


def _whole(head: Model) -> Model:
    """A head with the numbers that its packed weights stand for."""
    return jax.tree.map(_numbers, head, is_leaf=lambda leaf: isinstance(leaf, PackedWeight))


def _numbers(leaf: Any) -> jax.Array:
    packed = isinstance(leaf, PackedWeight)
    found = jnp.asarray(leaf.unpacked() if packed else leaf)
    return found.astype(jnp.float32) if jnp.issubdtype(found.dtype, jnp.floating) else found


def main(arguments: list[str] | None = None) -> int:
    """Write the average of two heads; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m train.average", description=main.__doc__)
    for name in ("target", "folder", "head", "other"):
        parser.add_argument(name)
    parser.add_argument("--share", type=float, default=0.5, help="of the other head's weights")
    options = parser.parse_args(arguments)
    try:
        if Path(options.folder).exists():
            raise ValueError(f"{options.folder} is there already; name another folder.")
        target = load_pair(options.target, "none").target
        heads = [
            load_feature_draft(Files(Path(named)), target, dtype="float32")
            for named in (options.head, options.other)
        ]
        one, other = (replace(each, embedding=jnp.zeros(1)) for each in heads)  # the target's
        made = average(one, other, options.share)
        save_model(replace(made, embedding=heads[0].embedding), options.folder)
    except (ValueError, OSError) as error:
        print(f"train.average: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
