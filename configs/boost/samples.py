"""The published rule on drafts of one start: samples whose tokens an earlier draft gives go.

Command:    python -m train.run configs/boost/samples.py --folder runs/bundled --out OUT
            (the stages before the drafts, and draft 0, are shared with configs/bundled.py)
Figures:    train/LOG.md
"""

import dataclasses

from configs.bundled import RECIPE as BUNDLED

RECIPE = dataclasses.replace(
    BUNDLED,
    name="samples",
    boost=dataclasses.replace(BUNDLED.boost, rule="samples", keep=0.0, own_start=False),
)
