"""Keys and values of the committed prefix, per row."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.platform import platform
from specjax.base.pytree import pytree, replace
from specjax.models import layers
from specjax.models.config import ModelConfig

NewKV = tuple[tuple[Array, Array], ...]
"""Per layer the keys and values `[B, K, T, D]` of one pass, or those of all layers stacked."""


@pytree
class KVCache:
    """Per layer keys `[P, K, D, S]` and values `[P, K, S, D]`, and how many slots count.

    Of a model with stacked layers there is one of each, with a first axis of layers.

    Nothing at or past a row's `length` is ever visible. Keys are stored transposed because both
    dots of attention then read memory in order. `pages` says where a batch of `B` rows lies: slot
    `s` of row `b` is slot `s % S` of page `pages[b, s // S]` (Kwon et al., arXiv 2309.06180); None
    stands for a page of its own for each row, in order.
    """

    keys: tuple[Float[Array, "*L P K D S"], ...]
    values: tuple[Float[Array, "*L P K S D"], ...]
    length: Int32[Array, " B"]
    pages: Int32[Array, "B N"] | None = None

    @property
    def slots(self) -> int:
        """Number of slots of a row."""
        return self.page_size * (1 if self.pages is None else self.pages.shape[-1])

    @property
    def page_size(self) -> int:
        """Number of slots of a page."""
        return self.keys[0].shape[-1]

    def keep(
        self, new: NewKV, path: Int32[Array, "B W"] | None, count: Int32[Array, " B"]
    ) -> "KVCache":
        """The cache with the first `count` tokens of `path` appended.

        `path` holds indices into the pass that gave `new`; `None` takes its tokens in order. The
        whole window is written, so `length + W` may not exceed `slots` where rows have one page.
        """
        keys, values = list(self.keys), list(self.values)
        for layer, (key, value) in enumerate(new):
            lead = key.ndim - 4
            if path is not None:
                at = path[(None,) * lead + (slice(None), None, slice(None), None)]
                key = jnp.take_along_axis(key, at, axis=-2)
                value = jnp.take_along_axis(value, at, axis=-2)
            key = key.swapaxes(-1, -2)
            keys[layer], values[layer] = (
                layers.write_window(whole, own, self.length, axis, self.pages, lead)
                for whole, own, axis in (
                    (keys[layer], key, lead + 3),
                    (values[layer], value, lead + 2),
                )
            )
        return replace(self, keys=tuple(keys), values=tuple(values), length=self.length + count)


def in_slots(
    new: tuple[Float[Array, "B K T D"], Float[Array, "B K T D"]], slots: int
) -> tuple[Float[Array, "B K D S"], Float[Array, "B K S D"]]:
    """Keys and values of a pass as a cache has them, of whose `slots` they are the first."""
    key, value = new[0].swapaxes(2, 3), new[1]
    free = (0, slots - value.shape[2])
    own, heads, whole = (0, 0), (0, 0), (0, 0)
    return jnp.pad(key, (own, heads, whole, free)), jnp.pad(value, (own, heads, free, whole))


def read_before_write(read: Array, written: tuple[Array, Array]) -> tuple[Array, Array]:
    """`written` as it is, but made after `read`, so that both can share a buffer.

    What a loop read of a cache says nothing of the keys and values that are written to it; XLA:CPU
    then copies the whole cache twice, lest it is written first. Barriers are gone by then. A choice
    between equals is not, as long as it cannot be known.
    """
    at = jnp.isnan(read[(0,) * read.ndim])
    key, value = (jnp.where(at, lax.optimization_barrier(each), each) for each in written)
    return key, value


def cache_dtype(weights: jnp.dtype) -> jnp.dtype:
    """The dtype of keys and values: the weights', but float32 on CPU, where it is faster."""
    return jnp.dtype("float32" if platform() == "cpu" else weights)


def empty_cache(
    config: ModelConfig,
    rows: int,
    slots: int,
    dtype: jnp.dtype,
    heads: int | None = None,
) -> KVCache:
    """A cache of `slots` slots for each of `rows` rows, holding nothing.

    `heads` are the key/value heads that a device has, by default all. Layers are not stacked.
    """
    heads = heads or config.num_kv_heads
    shape = (rows, heads, config.head_dim, slots)
    turned = (rows, heads, slots, config.head_dim)
    each = range(config.num_layers)
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in each),
        values=tuple(jnp.zeros(turned, dtype) for _ in each),
        length=jnp.zeros(rows, jnp.int32),
    )
