"""Attention of plain sequences, such as prompts: jax's own kernel on a TPU, XLA elsewhere."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.platform import platform
from pallas_kernels.tree_attention import xla

_SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention"
_LANES = 128
_BLOCKS = (1024, 512, 384, 256, 128)
"""Queries of a block, the first that divides a sequence. 131,072 tokens have 16,384 blocks of
1,024, which splash attention looks at one after the other as it is traced: 36 s of one core."""


def causal(
    query: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    soft_cap: float | None = None,
    window: int | None = None,
) -> Float[Array, "B H T D"]:
    """Each token sees itself and those before it; with a `window` the last `window` of these."""
    if platform() == "tpu" and can_splash(query, keys):
        return splash(query, keys, values, soft_cap, window)
    return xla.causal(query, keys, values, soft_cap, window)


def can_splash(query: Array, keys: Array) -> bool:
    """Whether splash attention takes such operands: it multiplies 16 bits, in blocks of 128."""
    tokens, dim = query.shape[2:]
    return keys.dtype == jnp.bfloat16 and tokens % _LANES == 0 and dim % 64 == 0


def splash(
    query: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    soft_cap: float | None = None,
    window: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B H T D"]:
    """The same by jax's splash attention, which passes over what is not seen."""
    heads, tokens, dim = query.shape[1:]
    kernel = _kernel(heads, tokens, soft_cap, window, interpret)
    scaled = (query * dim**-0.5).astype(keys.dtype)
    return jax.vmap(kernel)(scaled, keys, values).astype(query.dtype)


def _kernel(
    heads: int, tokens: int, soft_cap: float | None, window: int | None, interpret: bool
) -> Any:
    made, masks = (importlib.import_module(f"{_SPLASH}_{part}") for part in ("kernel", "mask"))
    shape = (tokens, tokens)
    seen = masks.CausalMask(shape)
    if window is not None and window < tokens:
        seen = masks.LocalMask(shape, window_size=(window - 1, 0), offset=0)
    block = next(size for size in _BLOCKS if tokens % size == 0)
    inner = next(size for size in _BLOCKS if block % size == 0 and size <= 512)
    return made.make_splash_mha(
        masks.MultiHeadMask([seen] * heads), head_shards=1, q_seq_shards=1,
        block_sizes=made.BlockSizes(block_q=block, block_kv=block, block_kv_compute=inner),
        attn_logits_soft_cap=soft_cap, interpret=interpret,
    )  # fmt: skip
