"""How many tokens a draft's chains give with its target, as a file in the draft's folder says it.

It is the pair's, whatever machine it runs on, and takes a while to measure.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from specjax.checkpoints.errors import CheckpointError

_FILE = "acceptance.json"


class Acceptance(NamedTuple):
    """Tokens per step of chains.

    Attributes:
      parameters: of the target.
      along: tokens of texts that the target wrote, at each temperature.
      tokens: per step by the levels of the chain, from 1 on; by temperature.
    """

    parameters: int
    along: int
    tokens: dict[float, tuple[float, ...]]

    def at(self, temperature: float) -> tuple[float, ...]:
        """Tokens per step at the nearest temperature, 0 being near to itself alone."""
        able = [each for each in self.tokens if (each == 0) == (temperature == 0)]
        return self.tokens[min(able, key=lambda each: abs(each - temperature))]


def read_acceptance(folder: Path) -> Acceptance | None:
    """What a draft's folder says, if it says so.

    Raises:
      CheckpointError: the file is damaged.
    """
    file = folder / _FILE
    if not file.is_file():
        return None
    try:
        held = json.loads(file.read_text("utf-8"))
        tokens = {float(each): tuple(map(float, of)) for each, of in held["tokens"].items()}
        found = Acceptance(int(held["parameters"]), int(held["along"]), tokens)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read ({type(error).__name__}: {error}).") from None
    whole = 0.0 in tokens and len(tokens) > 1 and all(tokens.values())
    if not whole or not all(each >= 1 for of in tokens.values() for each in of):
        raise CheckpointError(
            f"{file} must have tokens per step of 1 and more, at temperature 0 and one above."
        )
    return found


def write_acceptance(folder: Path, found: Acceptance) -> None:
    """Writes the file that `read_acceptance` reads."""
    tokens = {f"{each:g}": [round(one, 4) for one in of] for each, of in found.tokens.items()}
    held: dict[str, Any] = found._asdict() | {"tokens": tokens}
    (folder / _FILE).write_text(json.dumps(held) + "\n", "utf-8")
