"""An EAGLE-3 head for SmolLM2-135M-Instruct, from prompts that it writes and answers itself.

Command:    nice python -m train.run configs/eagle/smollm2.py target=DIR --folder runs/smollm2
            DIR is the Hugging Face folder of SmolLM2-135M-Instruct, or smollm2 where that is
            installed. Turns and answers are shared with configs/smollm2.py in one folder. A killed
            run goes on where it was; a larger collect.prompts goes on from what a smaller one
            collected.
Hardware:   any CPU with products of bfloat16; 19 GiB of memory while the training step is
            compiled, 11 afterwards (resident, with 1,024 answers).
Wall time:  two cores of an EPYC with AVX512-BF16 beside other work (2026-11-29), with
            collect.prompts=1536 schedule.steps=700 schedule.decay_steps=400, from which
            configs/eagle/messages.py went on: twelve batches of answers half an hour (150 to 220
            tokens/s), hidden states 25 minutes (500 to 790), the head 70 (4.0 s a step by itself,
            twice that beside other work).
To reach:   3.2 tokens per step of 15 nodes at T = 0, and 2.4 at T = 0.8. After 175 / 350 / 525 /
            700 of those steps the head foresaw 0.395 / 0.471 / 0.512 / 0.552 of the greedy tokens
            of held-out answers to messages of the model's own.
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
