"""Samples count as the probability that the earlier drafts' chains break inside them.

Command:    python -m train.run configs/boost/chance.py --folder runs/bundled --out OUT
            (the stages before the drafts, and draft 0, are shared with configs/bundled.py)
Figures:    train/LOG.md
"""

import dataclasses

from configs.bundled import RECIPE as BUNDLED

RECIPE = dataclasses.replace(
    BUNDLED,
    name="chance",
    boost=dataclasses.replace(BUNDLED.boost, rule="chance"),
)
