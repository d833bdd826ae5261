"""Models in GGUF files, llama.cpp's format: configuration, tensors and tokenizer in one file."""

from specjax.checkpoints.gguf.architectures import config_of, family_of
from specjax.checkpoints.gguf.blocks import (
    bytes_packed,
    form_of,
    is_packed,
    matrix_of,
    types_in,
    weights_of,
)
from specjax.checkpoints.gguf.header import SUFFIX, further_parts, header_of, is_gguf
from specjax.checkpoints.gguf.mixtures import UNPACKED
from specjax.checkpoints.gguf.tokenizer import tokenizer_of, vocabulary_of

__all__ = [
    "SUFFIX",
    "UNPACKED",
    "bytes_packed",
    "config_of",
    "family_of",
    "form_of",
    "further_parts",
    "header_of",
    "is_gguf",
    "is_packed",
    "matrix_of",
    "tokenizer_of",
    "types_in",
    "vocabulary_of",
    "weights_of",
]
