"""Drafts of three sizes: the first as bundled, the others smaller and cheaper.

Command:    python -m train.run configs/boost/sizes.py --folder runs/bundled --out OUT
            (the stages before the drafts, and draft 0, are shared with configs/bundled.py)
Figures:    train/LOG.md
"""

import dataclasses

from configs.bundled import RECIPE as BUNDLED
from train.config import Size

RECIPE = dataclasses.replace(
    BUNDLED,
    name="sizes",
    boost=dataclasses.replace(
        BUNDLED.boost,
        sizes=(
            BUNDLED.draft,
            Size(96, 288, 2, 3, 1, 32),
            Size(64, 192, 2, 2, 1, 32),
        ),
    ),
)
