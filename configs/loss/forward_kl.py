"""Distillation by forward KL. One draft.

Command:    python -m train.run configs/loss/forward_kl.py --folder runs/bundled --out OUT
            (the stages before the drafts, and draft 0, are shared with configs/bundled.py)
Figures:    train/LOG.md
"""

import dataclasses

from configs.bundled import RECIPE as BUNDLED

RECIPE = dataclasses.replace(
    BUNDLED,
    name="forward_kl",
    distil=dataclasses.replace(BUNDLED.distil, loss="forward_kl"),
    boost=dataclasses.replace(BUNDLED.boost, drafts=1),
)
