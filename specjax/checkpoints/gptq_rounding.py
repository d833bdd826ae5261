"""GPTQ (arXiv 2210.17323): a matrix in 4 bits whose products with the inputs of texts stay near."""

import numpy as np

from specjax.models.quantized import PackedWeight, bytes_of, packed

_DAMPING = 0.01
"""Of the mean of the diagonal, added to each of its entries."""
_BLOCK = 64
"""Inputs after which the others take over the errors in one product."""


def calibrated(
    matrix: np.ndarray, gram: np.ndarray, bits: int, group: int | None = None
) -> PackedWeight:
    """A matrix in symmetric integers, its inputs rounded one after the other.

    What rounding one input's weights changes of the products is taken back, as far as it goes, by
    the weights of the inputs that are still to come; the inputs with the largest squares come
    first. Scales are those of `packed`, set ahead, so that groups are of neighbours in any order.

    Args:
      matrix: `[O, I]`, floating-point numbers.
      gram: `[I, I]`, the sum over tokens of products of inputs.
      bits: of a weight.
      group: inputs that share a scale; None for a scale for each row.

    Returns:
      The packed matrix, which numpy holds.

    Raises:
      ValueError: as `packed`.
    """
    squares = np.diagonal(gram).astype(np.float64)
    seen = squares > 0
    if not seen.any():
        return packed(matrix, bits, group)
    importance = np.where(seen, squares / squares[seen].mean(), 1e-6)
    scaled = packed(matrix, bits, group, importance)
    scale = np.repeat(scaled.scale.astype(np.float32), scaled.group, axis=1)
    order = np.argsort(-squares, kind="stable")
    codes = np.empty(matrix.shape, np.uint8)
    codes[:, order] = _codes(
        np.ascontiguousarray(matrix.astype(np.float32).T[order]),
        np.ascontiguousarray(scale.T[order]),
        _factor(gram.astype(np.float64)[np.ix_(order, order)]),
        1 << (bits - 1),
    ).T
    return scaled.changed(values=bytes_of(codes, bits))


def _factor(gram: np.ndarray) -> np.ndarray:
    """The upper factor `U` of the inverse, `UᵀU`; inputs that were never seen are by themselves."""
    squares = np.diagonal(gram)
    extra = np.where(squares > 0, _DAMPING * squares.mean(), squares.mean())
    inverse = np.linalg.inv(gram + np.diag(extra))
    return np.linalg.cholesky((inverse + inverse.T) / 2).T.astype(np.float32)


def _codes(left: np.ndarray, scale: np.ndarray, factor: np.ndarray, most: int) -> np.ndarray:
    """Codes `[I, O]` of weights, which are changed, for scales of the same shape."""
    codes = np.empty(left.shape, np.uint8)
    for start in range(0, len(left), _BLOCK):
        stop = min(start + _BLOCK, len(left))
        errors = np.empty((stop - start, left.shape[1]), np.float32)
        for at in range(start, stop):
            code = np.clip(np.rint(left[at] / scale[at]), -most, most - 1)
            error = (left[at] - code * scale[at]) / factor[at, at]
            left[at + 1 : stop] -= factor[at, at + 1 : stop, None] * error
            codes[at], errors[at - start] = code + most, error
        left[stop:] -= factor[start:stop, stop:].T @ errors
    return codes
