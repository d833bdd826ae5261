"""Distillation by reverse KL. One draft.

Command:    python -m train.run configs/loss/reverse_kl.py --folder runs/bundled --out OUT
            (the stages before the drafts are shared with configs/bundled.py)
Figures:    train/LOG.md
"""

import dataclasses

from configs.bundled import RECIPE as BUNDLED

RECIPE = dataclasses.replace(
    BUNDLED,
    name="reverse_kl",
    distil=dataclasses.replace(BUNDLED.distil, loss="reverse_kl"),
    boost=dataclasses.replace(BUNDLED.boost, drafts=1),
)
