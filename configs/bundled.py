r"""The bundled pair: an 18.4M-parameter code model and three boosted drafts of 0.9M.

Command:    GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:\
glibc.malloc.trim_threshold=8589934592 python -m train.run configs/bundled.py --folder runs/bundled
            (the variable is optional: 1.6 times faster training under Linux). A killed run goes on
            where it was. The result is runs/bundled/export.
Hardware:   2 cores of a Zen 5 CPU with AVX-512; 5 GiB of memory.
Wall time:  target 60 minutes (37 at the rate of its calmer half); then collect 6, label 7, three
            warm-ups of 3, three drafts of 4, report 1: 35 minutes (2026-11-21, jax 0.10.2, beside
            other work). The tables that end a run come on top, half an hour or more.
To reach:   bits a byte 1.27 on the development modules, 1.68 held out (1.31 without locale.py, a
            table of aliases); of each draft on development prompts, chains of 8: agreement 0.88
            to 0.89, tokens per step 5.5 to 5.7 at T = 0 and 3.9 to 4.0 at T = 0.8; 6.6 for the
            pool at T = 0.
"""

from specjax.models.config import ModelConfig
from train.config import (
    Boost,
    Collect,
    Corpus,
    Distil,
    Evaluation,
    Labels,
    Reading,
    Recipe,
    Schedule,
    Size,
)

RECIPE = Recipe(
    name="specjax-bundled",
    target=ModelConfig(
        vocab_size=4096,
        hidden_size=640,
        intermediate_size=1536,
        num_layers=4,
        num_heads=10,
        num_kv_heads=2,
        head_dim=64,
        max_positions=2048,
        eos_ids=(0,),
    ),
    draft=Size(
        hidden_size=128,
        intermediate_size=384,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
    ),
    corpus=Corpus(),
    pretrain=Reading(
        steps=800, batch=8, length=512, long_steps=40, long_length=2048, decay_steps=350
    ),
    warm=Reading(
        steps=700,
        batch=8,
        length=512,
        long_steps=50,
        long_length=2048,
        decay_steps=200,
        dtype="float32",
    ),
    collect=Collect(prompts=6144, prompt_tokens=64, new_tokens=128),
    labels=Labels(top_k=32, corpus_rows=256, corpus_length=1024),
    schedule=Schedule(steps=1200, batch=18, decay_steps=600, dtype="float32", evaluate_every=200),
    distil=Distil(corpus_rows=1),
    boost=Boost(drafts=3, rule="samples", window=4, own_start=True),
    evaluation=Evaluation(),
)
