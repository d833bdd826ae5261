"""An EAGLE-3 head for SmolLM2-135M-Instruct."""

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
