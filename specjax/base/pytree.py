"""Frozen dataclasses that are JAX pytrees, with named static fields."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

_Cls = TypeVar("_Cls", bound=type)


def static(**kwargs: Any) -> Any:
    """A dataclass field that is part of the tree structure (hashable), not a leaf."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def pytree(cls: _Cls) -> _Cls:
    """A frozen dataclass registered as a pytree.

    Unflattening bypasses `__init__`, so placeholders (`jax.eval_shape`, partition specs) may
    stand where the annotations say arrays, also under a runtime type checker.
    """
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    leaves = tuple(f.name for f in fields if not f.metadata.get("static", False))
    statics = tuple(f.name for f in fields if f.metadata.get("static", False))

    def flatten_with_keys(tree: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        children = tuple((jax.tree_util.GetAttrKey(n), getattr(tree, n)) for n in leaves)
        return children, tuple(getattr(tree, n) for n in statics)

    def flatten(tree: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(tree, n) for n in leaves), tuple(getattr(tree, n) for n in statics)

    def unflatten(aux: tuple[Any, ...], children: Any) -> Any:
        return unchecked(cls, **dict(zip((*leaves, *statics), (*children, *aux), strict=True)))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def unchecked(cls: type, **fields: Any) -> Any:
    """An instance whose fields may be placeholders, such as partition specs."""
    tree = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(tree, name, value)
    return tree


def replace(tree: Any, **changes: Any) -> Any:
    """`tree` with the named fields replaced, the other fields shared."""
    return dataclasses.replace(tree, **changes)
