"""A boosted pool of two EAGLE-3 heads for the bundled target, and what it is to be compared with.

Command:    python -m train.run configs/eagle/pool.py --folder runs/pool --out runs/pool/boosted
            python -m train.run configs/eagle/pool.py boost.rule=alike --folder runs/pool \
                --out runs/pool/alike
            python -m train.run configs/eagle/pool.py boost.drafts=1 draft.num_heads=10 \
                draft.num_kv_heads=2 draft.intermediate_size=1448 --folder runs/pool \
                --out runs/pool/one
            The first makes the pool, the second two heads trained alike (seeds and rows differ),
            the third one head of the pool's cost. They share what is collected, the first two also
            draft 0. A killed run goes on where it was. Then
            python -m benchmarks.pools --drafts boosted=runs/pool/boosted alike=runs/pool/alike \
                one=runs/pool/one first=runs/pool/boosted/drafts/0 --prompts FILE...
Cost:       weights that a level reads, layer and unembedding: a head of the pool 2.826M, two
            5.652M, the one head 5.647M: twice the attention's heads, and what is left in its MLP.
            The projection of hidden states, 1.229M, runs once a step for each head, so twice for
            the pool. The heads read the same hidden states; all their weights are their own.
            No head has the shape of the target's last layer, so none begins as that (see
            `train.heads.begun`): unembedding, last norm and projection begin as the target's, the
            layer at random, of each head its own.
Hardware:   one core of an AMD EPYC (Zen 4) with AVX512-BF16; 4 GiB of memory.
Wall time:  beside other work (2026-11-29): answers 3 minutes, labels 2.5, hidden states 2.5, a head
            of the pool 5.5 to 10, the filter 3, the one head 12; each command a minute of reading
            the corpus.
To reach:   agreement 0.60 of draft 0, 0.58 and 0.55 of draft 1 boosted and alike, 0.59 of the one
            head; of the pools 0.655 and 0.646. 200 steps are few: no head is near its best.
"""

import dataclasses

from configs.bundled import RECIPE as BUNDLED
from train.config import (
    Boost,
    Collect,
    Distil,
    Evaluation,
    Head,
    Labels,
    Reading,
    Schedule,
    Size,
    Vocabulary,
)

RECIPE = dataclasses.replace(
    BUNDLED,
    name="eagle3-pool",
    target="bundled",
    pretrain=Reading(steps=0, batch=1),
    warm=Reading(steps=0, batch=1),
    collect=Collect(prompts=1024, prompt_tokens=64, new_tokens=128),
    labels=Labels(top_k=32, corpus_rows=0),
    distil=Distil(corpus_rows=0),
    vocabulary=Vocabulary(size=2048),
    draft=Size(640, 384, 1, 5, 1, 64),
    head=Head(levels=3, layers=(1, 2, 3)),
    schedule=Schedule(
        steps=200, batch=8, warmup_steps=20, decay_steps=100, save_every=50, evaluate_every=200
    ),
    boost=Boost(drafts=2, rule="samples", window=4, own_start=True),
    evaluation=Evaluation(prompts=64, depth=6, tables=()),
)
