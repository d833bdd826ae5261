"""Attention of plain sequences, such as prompts.

On a TPU it is jax's splash attention and on an NVIDIA GPU cuDNN's, of 16 bits both; on a CPU it is
ours in C++, of float32. XLA elsewhere.
"""

import functools
import importlib
import importlib.util
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.platform import at_hand, compute_capability, platform
from pallas_kernels.tree_attention import xla
from pallas_kernels.tree_attention.operands import of_sequence

_SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention"
_LANES = 128
_BLOCKS = (1024, 512, 384, 256, 128)
"""Queries of a block, the first that divides a sequence."""
_CUDA = "jax_cuda13_plugin", "jax_cuda12_plugin"
"""What knows cuDNN where there is no GPU."""
_AMPERE, _HOPPER = (8, 0), (9, 0)


def causal(
    query: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, "B H"] | None = None,
) -> Float[Array, "B H T D"]:
    """Each token sees itself and those before it; with a `window` the last `window` of these.

    Heads with `sinks` are XLA's on a GPU: of what cuDNN divides by, which would say what a sink
    leaves, `jax.nn.dot_product_attention` gives 8 bits alone.
    """
    if platform() == "tpu" and can_splash(query, keys):
        return splash(query, keys, values, soft_cap, window, sinks)
    if platform() == "gpu" and sinks is None and can_cudnn(query, keys, soft_cap):
        return fused(query, keys, values, window)
    if platform() == "cpu" and soft_cap is None:
        cpu = importlib.import_module("pallas_kernels.tree_attention.cpu")
        if cpu.unable(of_sequence(query, keys, values)) is None:
            return cpu.causal(query, keys, values, window, sinks)
    return xla.causal(query, keys, values, soft_cap, window, sinks)


def can_splash(query: Array, keys: Array) -> bool:
    """Whether splash attention takes such operands: it multiplies 16 bits, in blocks of 128."""
    tokens, dim = query.shape[2:]
    return keys.dtype == jnp.bfloat16 and tokens % _LANES == 0 and dim % 64 == 0


def can_cudnn(query: Array, keys: Array, soft_cap: float | None) -> bool:
    """Whether cuDNN's attention takes such operands: 16 bits, from compute capability 8.0 on."""
    capability, dim = compute_capability(), query.shape[3]
    return (
        capability is not None
        and (at_hand() or any(importlib.util.find_spec(name) for name in _CUDA))
        and capability >= _AMPERE
        and keys.dtype in (jnp.bfloat16, jnp.float16)
        and soft_cap is None
        and dim % 8 == 0
        and dim <= (256 if capability >= _HOPPER else 128)
    )


def fused(
    query: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    window: int | None = None,
    implementation: Literal["xla", "cudnn"] = "cudnn",
) -> Float[Array, "B H T D"]:
    """The same by `jax.nn.dot_product_attention`."""
    kind = query.dtype
    query, keys, values = (x.astype(keys.dtype).swapaxes(1, 2) for x in (query, keys, values))
    mixed = jax.nn.dot_product_attention(
        query, keys, values, is_causal=True, implementation=implementation,
        local_window_size=None if window is None else (window - 1, 0),
    )  # fmt: skip
    return mixed.swapaxes(1, 2).astype(kind)


def splash(
    query: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, "B H"] | None = None,
    interpret: bool = False,
) -> Float[Array, "B H T D"]:
    """The same by jax's splash attention, which passes over what is not seen."""
    heads, tokens, dim = query.shape[1:]
    kernel = _kernel(heads, tokens, soft_cap, window, interpret)
    scaled = (query * dim**-0.5).astype(keys.dtype)
    if sinks is None:
        return jax.vmap(kernel)(scaled, keys, values).astype(query.dtype)
    mixed = jax.vmap(lambda *at: kernel(*at[:3], sinks=at[3]))(scaled, keys, values, sinks)
    return mixed.astype(query.dtype)


def _kernel(
    heads: int, tokens: int, soft_cap: float | None, window: int | None, interpret: bool
) -> Any:
    made, masks = (importlib.import_module(f"{_SPLASH}_{part}") for part in ("kernel", "mask"))
    seen = plain_mask(tokens, window)
    block = next(size for size in _BLOCKS if tokens % size == 0)
    inner = next(size for size in _BLOCKS if block % size == 0 and size <= 512)
    return made.make_splash_mha(
        masks.MultiHeadMask([seen] * heads), head_shards=1, q_seq_shards=1,
        block_sizes=made.BlockSizes(block_q=block, block_kv=block, block_kv_compute=inner),
        attn_logits_soft_cap=soft_cap, interpret=interpret,
    )  # fmt: skip


def plain_mask(tokens: int, window: int | None) -> Any:
    """What tokens of a plain sequence see, for splash attention."""
    left = None if window is None or window >= tokens else window - 1
    return _blockwise()((tokens, tokens), window_size=(left, 0), offset=0)


@functools.cache
def _blockwise() -> Any:
    """Jax's local mask, whose blocks are a single entry where all or nothing of them is seen.

    Splash attention looks at every block of a mask as it is traced: of 131,072 tokens that were 17
    billion entries, 36 s of one core (Zen 3).
    """
    masks = importlib.import_module(f"{_SPLASH}_mask")

    class Blockwise(masks.LocalMask):
        def __getitem__(self, index: tuple[slice, ...]) -> Any:
            queries, keys = (
                range(*one.indices(n)) for one, n in zip(index, self.shape, strict=True)
            )
            nearest, farthest = queries[0] - keys[-1], queries[-1] - keys[0]
            left = self.window_size[0]
            left = self.shape[1] if left is None else left
            if (nearest >= 0 and farthest <= left) or farthest < 0 or nearest > left:
                index = tuple(slice(one[0], one[0] + 1) for one in (queries, keys))
            return super().__getitem__(index)

    return Blockwise
