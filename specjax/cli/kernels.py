"""What `--kernels` names, and what the kernels say."""

import logging
import sys

import jax

import pallas_kernels
from pallas_kernels.tree_attention.implementations import IMPLEMENTATIONS
from specjax.verify.rules import AUTO


class _Lines(logging.Handler):
    """Prints a remark on standard error, in the first of several processes."""

    def emit(self, record: logging.LogRecord) -> None:
        if jax.process_index() == 0:
            print(f"specjax: {record.getMessage()}", file=sys.stderr, flush=True)


_lines = _Lines()


def check_kernels(name: str) -> None:
    """Checks what `--kernels` names, which may not be for this platform.

    Raises:
      ValueError: there is no such implementation.
    """
    if name not in (AUTO, *IMPLEMENTATIONS):
        there = ", ".join(sorted(IMPLEMENTATIONS))
        raise ValueError(f"--kernels is {name!r}; it must be auto or one of {there}.")


def use_kernels(name: str) -> None:
    """Lets the whole command run what `--kernels` names, and prints what the kernels say.

    Nothing of jax may be left that has to run before its devices are known (`devices_for`).

    Raises:
      ValueError: there is no such implementation, or it cannot run here.
    """
    check_kernels(name)
    logger = logging.getLogger("pallas_kernels")
    logger.setLevel(logging.INFO)
    if _lines not in logger.handlers:
        logger.addHandler(_lines)
    pallas_kernels.use(name)
