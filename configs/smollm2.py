r"""Drafts for SmolLM2-135M-Instruct, from prompts that it writes or finishes itself.

Command:    nice python -m train.run configs/smollm2.py target=DIR --folder runs/smollm2
            DIR is the Hugging Face folder of SmolLM2-135M-Instruct. A killed run goes on where it
            was; a larger collect.prompts goes on from what a smaller one collected. The result
            comes with the package: specjax/bundled/smollm2.
Hardware:   one core of an EPYC with AVX512-BF16 was used, 3 GiB of memory.
Wall time:  answers 200 to 300 tokens/s on that core beside other work, so three hours for 9,216
            (2.55M tokens); turns 120 to 300; trigrams 4 minutes; the draft 33 minutes (1.2 s a
            step; 0.75 on two cores). Ways of collecting, one core, shared with other work
            (2026-11-27): `generate_jit` 364, 366, 390 tokens/s in batches of 16, 32, 64 of 128
            tokens that never end, 186 where rows wait for the longest (turns, 64); engine of 16
            rows 196 to 221, of 32 207, whatever ends. A pass of 16 columns is bound by arithmetic
            (142 GFLOP/s, XLA's own rate there), so drafting cannot help.
Drafts:     a pruned vocabulary (`specjax.models.pruning`), as an unembedding of 49,152 rows takes
            1.4 ms a column at width 256, and one of 8,192 with its map 0.13. Share of the tokens
            of held-out answers among the most frequent of as many others (230,000 each):
                       2,047   4,095   8,191  12,287  16,383
            T = 0      0.864   0.917   0.950   0.966   0.974
            T = 0.8    0.850   0.903   0.944   0.962   0.971
            T = 1      0.776   0.841   0.900   0.930   0.946
            8,191 tokens and the row of the others, width 256, 2 layers: 7 MB in bfloat16. Steps of
            random drafts (Q4_1, one row, chains of 2 / 4 / 6, over a plain step of 8.7 ms): width
            192, 1 layer 1.5 / 2.4 / 2.8; 256, 2 layers 1.7 / 2.5 / 2.9; 384, 2 layers 1.8 / 2.6 /
            3.1; 576, 3 layers 1.9 / 3.3 / 4.0 (before products kept their sums in registers).
To reach:   agreement 0.512 along its own answers; along answers to what people ask 1.36 tokens per
            step of one node, of the n-gram model 1.42.
"""

import dataclasses

from configs.boost.from_checkpoint import RECIPE as FROM_CHECKPOINT
from train.beginnings import beginnings
from train.config import (
    Collect,
    Corpus,
    Distil,
    Labels,
    Reading,
    Schedule,
    Size,
    Trigrams,
    Turns,
    Vocabulary,
)

RECIPE = dataclasses.replace(
    FROM_CHECKPOINT,
    name="smollm2",
    corpus=Corpus(),
    turns=Turns(tokens=96, temperatures=(0.8, 1.0), batch=256, free=39, beginnings=beginnings()),
    collect=Collect(
        prompts=9216, prompt_tokens=128, new_tokens=384, batch=128, rows=16, dtype="bfloat16"
    ),
    vocabulary=Vocabulary(size=8191),
    draft=Size(256, 704, 2, 4, 2, 64),
    warm=Reading(steps=0, batch=1),
    labels=Labels(top_k=20, corpus_rows=0, tokens=4096),
    schedule=Schedule(
        steps=1600, batch=12, warmup_steps=50, decay_steps=800, save_every=100, evaluate_every=200
    ),
    distil=Distil(corpus_rows=0),
    trigrams=Trigrams(contexts=96_000, width=4),
    boost=dataclasses.replace(FROM_CHECKPOINT.boost, drafts=1),
    evaluation=dataclasses.replace(
        FROM_CHECKPOINT.evaluation, prompts=64, prompt_tokens=128, new_tokens=384
    ),
)
