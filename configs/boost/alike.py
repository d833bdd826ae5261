"""No boosting: drafts that differ in their seeds alone.

Command:    python -m train.run configs/boost/alike.py --folder runs/bundled --out OUT
            (the stages before the drafts, and draft 0, are shared with configs/bundled.py)
Figures:    train/LOG.md
"""

import dataclasses

from configs.bundled import RECIPE as BUNDLED

RECIPE = dataclasses.replace(
    BUNDLED,
    name="alike",
    boost=dataclasses.replace(BUNDLED.boost, rule="alike"),
)
