"""Fine-tunes an EAGLE-3 head on its target's answers to messages of users.

Command:    python -m train.messages messages.jsonl --count 4200
            nice python -m train.run configs/eagle/messages.py target=DIR head.start=HEAD
            corpus=messages.jsonl --folder runs/messages
            HEAD is a published head's folder, or what configs/eagle/smollm2.py left in
            export/drafts/0. Messages of your own traffic are better than those made here: lines
            of {"prompt"} or {"turns"}.
Hardware:   any CPU with products of bfloat16; 19 GiB of memory while the training step is
            compiled, 9 afterwards.
Wall time:  an EPYC with AVX512-BF16 beside other work (2026-11-30): answers 32 minutes (360
            tokens/s) and hidden states 26 (1,400) on two cores, the head 77 on one (6.5 s a step).
            It made specjax/bundled/smollm2/eagle3 of what an earlier run had made, with 1,024
            answers and 600 steps from what configs/eagle/smollm2.py had made.
To reach:   0.659 of the greedy tokens of held-out answers foreseen, still rising.
"""

import dataclasses

from configs.eagle.smollm2 import RECIPE as SMOLLM2
from train.config import Corpus, Schedule, Turns

RECIPE = dataclasses.replace(
    SMOLLM2,
    name="messages-eagle3",
    target="",
    corpus=Corpus(files=("",)),
    turns=Turns(),
    collect=dataclasses.replace(
        SMOLLM2.collect, prompts=4096, prompt_tokens=256, new_tokens=256, temperatures=(0.0, 0.8),
        chat=True,
    ),
    schedule=Schedule(
        steps=700, batch=6, warmup_steps=40, decay_steps=400, save_every=50, evaluate_every=100
    ),
    evaluation=dataclasses.replace(
        SMOLLM2.evaluation, prompts=48, prompt_tokens=256, new_tokens=192, batch=48
    ),
)  # fmt: skip
