"""One alphabet of axes for annotations and einsum strings.

`B` rows (requests) · `T` tokens of one pass · `N` tree nodes (root included) · `R` rows of the
draft-distribution table · `S` cache slots · `W` commit window · `V` vocabulary · `H` heads · `K`
key/value heads · `G` query heads per key/value head · `D` head dimension · `E` hidden width
(embedding) · `F` feed-forward width · `C` flat columns, that is rows × tokens · `U` the target's
vocabulary, where a draft's tables have fewer rows.
"""

from typing import TypeAlias

from jaxtyping import Array, Bool, Float, Int32, Key, UInt32

KeyArray: TypeAlias = Key[Array, ""] | UInt32[Array, "2"]

__all__ = ["Array", "Bool", "Float", "Int32", "Key", "KeyArray", "UInt32"]
