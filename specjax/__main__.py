"""`python -m specjax`."""

import sys

from specjax.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
