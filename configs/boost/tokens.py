"""Single tokens, not samples: those that an earlier draft gives count a fifth.

Command:    python -m train.run configs/boost/tokens.py --folder runs/bundled --out OUT
            (the stages before the drafts, and draft 0, are shared with configs/bundled.py)
Figures:    train/LOG.md
"""

import dataclasses

from configs.bundled import RECIPE as BUNDLED

RECIPE = dataclasses.replace(
    BUNDLED,
    name="tokens",
    boost=dataclasses.replace(BUNDLED.boost, rule="tokens", keep=0.2),
)
