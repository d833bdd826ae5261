r"""Drafts for SmolLM2-135M-Instruct, from prompts that it writes itself.

Command:    nice python -m train.run configs/smollm2.py target=DIR --folder runs/smollm2 \
                --stages collect
            DIR is the Hugging Face folder of SmolLM2-135M-Instruct. A killed run goes on where it
            was; a larger collect.prompts goes on from what a smaller one collected.
"""

import dataclasses

from configs.boost.from_checkpoint import RECIPE as FROM_CHECKPOINT
from train.config import Collect, Corpus, Turns

RECIPE = dataclasses.replace(
    FROM_CHECKPOINT,
    name="smollm2",
    corpus=Corpus(),
    turns=Turns(tokens=96, temperatures=(0.8, 1.0), batch=256),
    collect=Collect(
        prompts=12288, prompt_tokens=128, new_tokens=384, batch=128, rows=16, dtype="bfloat16"
    ),
    evaluation=dataclasses.replace(
        FROM_CHECKPOINT.evaluation, prompts=64, prompt_tokens=128, new_tokens=384
    ),
)
