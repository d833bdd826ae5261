r"""A draft for the draft: 0.3M parameters, distilled from the bundled draft 0.

Command:    python -m train.run configs/stage2.py --folder runs/stage2
            The result is runs/stage2/export: drafts/0, and the trigram model of configs/ngram.py,
            whose stages are shared, as ngram.
To reach:   to come.
"""

import dataclasses

from configs.ngram import RECIPE as NGRAM
from train.config import Size

RECIPE = dataclasses.replace(
    NGRAM,
    name="stage2",
    draft=Size(
        hidden_size=64,
        intermediate_size=192,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
    ),
    schedule=dataclasses.replace(NGRAM.schedule, steps=2400, decay_steps=1200, evaluate_every=400),
)
