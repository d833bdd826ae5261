r"""A draft for the draft: 0.3M parameters, distilled from the bundled draft 0.

Command:    python -m train.run configs/stage2.py --folder runs/stage2
            The result is runs/stage2/export: drafts/0, and the trigram model of configs/ngram.py,
            whose stages are shared, as ngram.
Hardware:   1 core of a Zen 5 CPU with AVX-512; 3 GiB of memory.
Wall time:  after the stages of configs/ngram.py: warm-up 1.5 minutes, distillation 12 (2026-11-21,
            jax 0.10.2, beside other work).
To reach:   agreement with draft 0 on its greedy continuations of development prompts 0.882 (0.945
            among 2, 0.975 among 4 tokens), 5.5 tokens per step of a chain of 8, 3.86 at T = 0.8.
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
    schedule=dataclasses.replace(NGRAM.schedule, steps=4800, decay_steps=2400, evaluate_every=800),
)
