"""What is measured: prompts, and how they are continued."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from specjax.checkpoints.huggingface import default_dtype
from specjax.measure.prompts import Prompt
from specjax.methods.method import Setting

PLAIN_DTYPES = ("float32", "bfloat16")
MIXED = "mixed"
Temperature = float | str


class Candidate(NamedTuple):
    """A setting at one dtype of the target."""

    setting: Setting
    dtype: str


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts, and every way in which they are continued for `max_new_tokens` tokens.

    `settings` are compared with plain decoding, those of each batch size in `settings`; without
    `dtypes` the device's default is taken. `verify` names the rule. Prompt i samples with
    `fold_in(jax.random.key(seed), i)`. `mixed` adds batches of which every other row is greedy.
    Plain decoding is measured in `plain_dtypes`. With `stop_at_eos` texts end at end tokens.
    """

    prompts: Sequence[Prompt]
    settings: Mapping[int, Sequence[Setting]]
    temperatures: tuple[float, ...] = (0.0, 0.8)
    dtypes: tuple[str, ...] = ()
    max_new_tokens: int = 128
    verify: str = "auto"
    seed: int = 0
    mixed: bool = True
    stop_at_eos: bool = False
    plain_dtypes: tuple[str, ...] = PLAIN_DTYPES

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes, in rows."""
        return tuple(self.settings)

    def candidates(self, batch: int) -> list[Candidate]:
        """Plain decoding in its dtypes, then the settings in the dtypes asked for."""
        plain = [Candidate(Setting(), dtype) for dtype in self.plain_dtypes]
        dtypes = self.dtypes or (default_dtype(),)
        settings = dict.fromkeys(self.settings[batch])
        return plain + [Candidate(one, dtype) for dtype in dtypes for one in settings]

    def temperatures_of(self, batch: int) -> tuple[Temperature, ...]:
        """The temperatures; for a batch above 1 also half greedy and half sampled."""
        mixed = self.mixed and batch > 1 and max(self.temperatures) > 0
        return (*self.temperatures, MIXED) if mixed else self.temperatures
