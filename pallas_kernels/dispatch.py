"""Choice of an implementation: `None` always works, a named one fails with its reason."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Implementation = Callable[..., Any]


class ImplementationError(RuntimeError):
    """A named implementation does not exist or cannot run here."""


def pick(
    op: str,
    implementation: str | None,
    available: Mapping[str, Implementation],
    default: Mapping[str, str],
) -> Implementation:
    """The implementation of `op` to run.

    `default` maps a platform ("cpu", "gpu", "tpu") to a name in `available`; a platform without
    an entry takes "xla".

    Raises:
      ImplementationError: `implementation` names nothing in `available`.
    """
    name = implementation or default.get(jax.default_backend(), "xla")
    if name not in available:
        raise ImplementationError(
            f"{op} has no implementation {name!r}; there are {', '.join(sorted(available))}."
        )
    return available[name]


def precision_of(dtype: jnp.dtype) -> lax.Precision:
    """The precision of a dot: float32 operands are multiplied as such on every platform.

    The default there is 19 (GPU) or 8 (TPU) bits of them, by the number of columns: enough for a
    tree pass to disagree with plain decoding.
    """
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
