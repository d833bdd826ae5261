"""How many tokens what drafts gives with its target, as a file in its folder says it.

It is the pair's, whatever machine it runs on, and takes a while to measure.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from specjax.checkpoints.errors import CheckpointError

_FILE = "acceptance.json"


class Acceptance(NamedTuple):
    """Tokens per step of a draft's chains, or of an n-gram model's trees.

    Attributes:
      target_parameters: how many the target has.
      num_tokens: of the target's own texts along which it was measured, at each temperature.
      tokens_per_step: by the nodes, from 1 on; by temperature.
    """

    target_parameters: int
    num_tokens: int
    tokens_per_step: dict[float, tuple[float, ...]]

    def at(self, temperature: float) -> tuple[float, ...]:
        """Tokens per step at the nearest temperature, 0 being near to itself alone."""
        able = [each for each in self.tokens_per_step if (each == 0) == (temperature == 0)]
        return self.tokens_per_step[min(able, key=lambda each: abs(each - temperature))]


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
        tokens = {
            float(each): tuple(map(float, of)) for each, of in held["tokens_per_step"].items()
        }
        found = Acceptance(int(held["target_parameters"]), int(held["num_tokens"]), tokens)
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
    tokens = {
        f"{each:g}": [round(one, 4) for one in of] for each, of in found.tokens_per_step.items()
    }
    held: dict[str, Any] = found._asdict() | {"tokens_per_step": tokens}
    (folder / _FILE).write_text(json.dumps(held) + "\n", "utf-8")
