"""The fastest setting for a target of which a part is read in every pass.

Of layers a pass takes as long as reading takes, or computing, whichever is longer (SpecExec, arXiv
2406.02532, section 4): so the budget follows from these and from acceptance. Of experts more nodes
read more.
"""

import dataclasses
from collections.abc import Sequence

from specjax.decoding.pass_times import (
    ExpertTimes,
    OffloadTimes,
    draft_seconds,
    expert_times,
    offload_times,
)
from specjax.measure.tune import Tuner
from specjax.methods import registry
from specjax.methods.choice import shipped
from specjax.methods.draftless import bundled
from specjax.methods.method import Setting
from specjax.models import memory
from specjax.models.transformer import Model


def budgets_for_reading(target: Model) -> tuple[int, ...]:
    """Of layers the least budget, that whose pass costs no more than reading, and about twice as
    many nodes; of experts small ones.

    Raises:
      ValueError: a layer could not be read.
    """
    if target.expert_cache is not None:
        return ExpertTimes.budgets
    return offload_times(target).budgets


@dataclasses.dataclass
class StreamedTuner(Tuner):
    """As `Tuner`, with the seconds of a step by what was measured of reading and computing.

    Texts are drawn once, and by what drafts best before anything is known: plain decoding would
    read all layers for each token. Each finalist is run once.
    """

    rounds: int = 1

    @property
    def times(self) -> OffloadTimes | ExpertTimes:
        """What was measured of the target.

        Raises:
          ValueError: a layer could not be read.
        """
        target = self.grown.target
        if target.expert_cache is not None:
            return expert_times(target, bundled(self.grown).tokens)
        return offload_times(target)

    def pass_seconds(self, nodes: int) -> float:
        """Of a pass over the nodes and the root."""
        return self.times.pass_seconds(nodes + 1)

    def draft_seconds(self, setting: Setting, temperature: float) -> float:
        """As many passes of the draft as the tree is deep; what needs no model takes none."""
        del temperature
        if not memory.loads_in(registry.build(setting, self.grown)):
            return 0.0
        growth, widths = setting.growth, setting.widths or ()
        passes = len(widths) if growth is None else growth.depth
        return passes * sum(map(draft_seconds, self._drafts(setting)))

    def _drafts(self, setting: Setting) -> Sequence[Model]:
        return self.grown.drafts if setting.method == "pool" else self.grown.drafts[:1]

    def _writer(self, temperature: float) -> Setting:
        return shipped(self.grown, temperature, self.choices.batch).setting
