"""A pool of drafts for a target that you have, from texts that you have.

Command:    python -m train.run configs/boost/from_checkpoint.py target=DIR corpus=FILES... \
                --folder runs/mine
            DIR is a Hugging Face folder with a tokenizer; FILES are text files, folders of source
            code, or .jsonl with a "prompt", a "text" or "turns" a line. The result is
            runs/mine/export:
            specjax generate PROMPT --model DIR --draft runs/mine/export/drafts/0
Hardware:   any; memory for the target, and for a few times 8,192 positions over its vocabulary
            (4 bytes each: 1 GB for a vocabulary of 32,000).
Wall time:  collecting is the target's plain decoding of collect.prompts times collect.new_tokens
            tokens; labelling one pass over them; then the drafts. With the bundled pair's target,
            2 cores of a Zen 5 CPU: about the 35 minutes that configs/bundled.py takes after its
            target; a first look with collect.prompts=512 warm.steps=100 warm.decay_steps=50
            schedule.steps=150 schedule.decay_steps=75 boost.drafts=2 took 3 minutes to its export.
            The tables that end a run come on top: half an hour or more, all of them
            (evaluation.tables=coverage for that one alone).
To reach:   `agreement` in the log, the share of the target's greedy tokens that a draft foresees:
            a pool is worth having above 0.6. Larger targets want larger drafts, for example
            draft.hidden_size=512 draft.intermediate_size=1536 draft.num_heads=8
            draft.num_kv_heads=4 draft.head_dim=64, and longer schedules (schedule.steps=5000).
"""

import dataclasses

from configs.bundled import RECIPE as BUNDLED
from train.config import Corpus, Labels, Reading

RECIPE = dataclasses.replace(
    BUNDLED,
    name="from-checkpoint",
    target="",
    corpus=Corpus(files=("",)),
    pretrain=Reading(steps=0, batch=1),
    warm=dataclasses.replace(BUNDLED.warm, long_steps=0, long_length=0),
    labels=Labels(top_k=32, corpus_rows=256, corpus_length=512, tokens=4096),
    distil=dataclasses.replace(BUNDLED.distil, corpus_rows=2),
)
