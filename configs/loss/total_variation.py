"""Distillation by total variation. One draft.

Command:    python -m train.run configs/loss/total_variation.py --folder runs/bundled --out OUT
            (the stages before the drafts are shared with configs/bundled.py)
Figures:    train/LOG.md
"""

import dataclasses

from configs.bundled import RECIPE as BUNDLED

RECIPE = dataclasses.replace(
    BUNDLED,
    name="total_variation",
    distil=dataclasses.replace(BUNDLED.distil, loss="total_variation"),
    boost=dataclasses.replace(BUNDLED.boost, drafts=1),
)
