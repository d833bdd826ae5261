"""Sentences about what was read, which stop nothing: on standard error, by Python's `logging`."""

import logging

LOGGER = logging.getLogger("specjax.notices")


def notice(sentence: str) -> None:
    """Says something that a person should know; a program may handle or silence `LOGGER`."""
    LOGGER.warning("specjax: %s", sentence)
