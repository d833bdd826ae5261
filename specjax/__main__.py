"""`python -m specjax`."""

from typing import NoReturn

from specjax.base.interrupts import leave
from specjax.cli.main import main

__all__ = ["main", "run"]


def run() -> NoReturn:
    """Runs the command line, and ends the process."""
    leave(main())


if __name__ == "__main__":
    run()
