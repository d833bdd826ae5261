"""Distillation by cross-entropy on the target's tokens. One draft.

Command:    python -m train.run configs/loss/cross_entropy.py --folder runs/bundled --out OUT
            (the stages before the drafts are shared with configs/bundled.py)
Figures:    train/LOG.md
"""

import dataclasses

from configs.bundled import RECIPE as BUNDLED

RECIPE = dataclasses.replace(
    BUNDLED,
    name="cross_entropy",
    distil=dataclasses.replace(BUNDLED.distil, loss="cross_entropy"),
    boost=dataclasses.replace(BUNDLED.boost, drafts=1),
)
