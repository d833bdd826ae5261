"""What verification decides about a tree."""

from jaxtyping import Array, Int32

from specjax.base.pytree import pytree


@pytree
class Accepted:
    """What verification decides: the first `count` entries of `path`, and the next `token`.

    `path` starts at the root (node 0), so a step emits `count` tokens: those of `path[1:count]`,
    then `token`. `count` is also how many of the pass's keys and values are kept.
    """

    path: Int32[Array, "*B W"]
    count: Int32[Array, "*B"]
    token: Int32[Array, "*B"]
