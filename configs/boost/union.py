"""Samples are marked where the earlier drafts' trees of width 2 cover the target's tokens.

Command:    python -m train.run configs/boost/union.py --folder runs/bundled --out OUT
            (the stages before the drafts, and draft 0, are shared with configs/bundled.py)
Figures:    train/LOG.md
"""

import dataclasses

from configs.bundled import RECIPE as BUNDLED

RECIPE = dataclasses.replace(
    BUNDLED,
    name="union",
    boost=dataclasses.replace(BUNDLED.boost, rule="union", cover=2),
)
