"""Later drafts learn what verification has left of the target's distribution (half and half with
it).

Command:    python -m train.run configs/boost/residual.py --folder runs/bundled --out OUT
            (the stages before the drafts, and draft 0, are shared with configs/bundled.py)
Figures:    train/LOG.md
"""

import dataclasses

from configs.bundled import RECIPE as BUNDLED

RECIPE = dataclasses.replace(
    BUNDLED,
    name="residual",
    boost=dataclasses.replace(BUNDLED.boost, rule="residual", keep=0.5),
)
