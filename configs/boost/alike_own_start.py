"""No boosting, and every draft warmed up from weights of its own.

Command:    python -m train.run configs/boost/alike_own_start.py --folder runs/bundled --out OUT
            (the stages before the drafts, and draft 0, are shared with configs/bundled.py)
Figures:    train/LOG.md
"""

import dataclasses

from configs.bundled import RECIPE as BUNDLED

RECIPE = dataclasses.replace(
    BUNDLED,
    name="alike_own_start",
    boost=dataclasses.replace(BUNDLED.boost, rule="alike", own_start=True),
)
