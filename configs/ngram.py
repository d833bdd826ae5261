r"""A trigram model of the bundled draft 0: what drafts for the draft (Staged, arXiv 2308.04623).

Command:    python -m train.run configs/ngram.py --folder runs/stage2 \
                --stages tokenizer,collect,label,trigrams
            The result is runs/stage2/trigrams-*/model. A killed run goes on where it was.
To reach:   to come
"""

import dataclasses

from configs.bundled import RECIPE as PAIR
from specjax.checkpoint import BUNDLED
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
    trigrams=Trigrams(contexts=24_000, width=8),
)
