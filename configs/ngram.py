r"""A trigram model of the bundled draft 0: what drafts for the draft (Staged, arXiv 2308.04623).

Command:    python -m train.run configs/ngram.py --folder runs/stage2 \
                --stages tokenizer,collect,label,trigrams
            The result is runs/stage2/trigrams-*/model. A killed run goes on where it was;
            configs/stage2.py, which shares these stages, exports it.
Hardware:   1 core of a Zen 5 CPU with AVX-512; 3 GiB of memory.
Wall time:  12 minutes (2026-11-21, jax 0.10.2, beside other work): 1.57M tokens collected in 5,
            5.5M positions labelled in 5, the 7.0M tokens that were said counted in 2 seconds.
To reach:   on draft 0's continuations of development prompts, draft 0's token among the table's
            1 / 2 / 4 likeliest: greedy 0.587 / 0.720 / 0.815; at 0.8 its most likely token 0.453 /
            0.601 / 0.727 and the drawn one 0.296 / 0.409 / 0.513.
"""

import dataclasses

from configs.bundled import RECIPE as PAIR
from specjax.checkpoints.files import BUNDLED
from train.config import Boost, Collect, Labels, Reading, Trigrams

RECIPE = dataclasses.replace(
    PAIR,
    name="ngram",
    target=str(BUNDLED / "drafts" / "0"),
    pretrain=Reading(steps=0, batch=1),
    collect=Collect(prompts=12288, prompt_tokens=64, new_tokens=128, batch=128),
    labels=Labels(top_k=16, corpus_rows=3072, corpus_length=1024, tokens=16384, dtype="float32"),
    boost=Boost(drafts=1),
    evaluation=dataclasses.replace(PAIR.evaluation, tables=()),
    trigrams=Trigrams(contexts=16_000, width=8),
)
