"""An EAGLE-3 head for SmolLM2-135M-Instruct, from prompts that it writes and answers itself.

Command:    nice python -m train.run configs/eagle/smollm2.py target=DIR --folder runs/smollm2
            DIR is the Hugging Face folder of SmolLM2-135M-Instruct, or smollm2 where that is
            installed. Turns and answers are shared with configs/smollm2.py in one folder. A killed
            run goes on where it was; a larger collect.prompts goes on from what a smaller one
            collected.
Hardware:   any CPU with products of bfloat16; 6 GiB of memory.
Wall time:  not run whole yet. Begun on two cores of an EPYC with AVX512-BF16 beside other work
            (2026-11-29): programs compiled 6 minutes, turns 5 minutes for 1,600, answers 92
            tokens/s.
To reach:   3.2 tokens per step of 15 nodes at T = 0, and 2.4 at T = 0.8.
"""

import dataclasses

from configs.smollm2 import RECIPE as SMOLLM2
from train.config import Head, Schedule, Size, Trigrams, Vocabulary

RECIPE = dataclasses.replace(
    SMOLLM2,
    name="smollm2-eagle3",
    collect=dataclasses.replace(SMOLLM2.collect, prompts=1536),
    vocabulary=Vocabulary(size=8191),
    draft=Size(576, 1536, 1, 9, 3, 64),
    head=Head(levels=3),
    schedule=Schedule(
        steps=800, batch=8, warmup_steps=40, decay_steps=400, save_every=50, evaluate_every=200
    ),
    trigrams=Trigrams(contexts=0),
    evaluation=dataclasses.replace(SMOLLM2.evaluation, tables=()),
)
