"""AdaBoost's weights on single tokens.

Command:    python -m train.run configs/boost/errors.py --folder runs/bundled --out OUT
            (the stages before the drafts, and draft 0, are shared with configs/bundled.py)
Figures:    train/LOG.md
"""

import dataclasses

from configs.bundled import RECIPE as BUNDLED

RECIPE = dataclasses.replace(
    BUNDLED,
    name="errors",
    boost=dataclasses.replace(BUNDLED.boost, rule="errors", strength=0.5),
)
