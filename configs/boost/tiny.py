"""Every stage of a run, from corpus to exported pool, in miniature.

Command:    python -m train.run configs/boost/tiny.py --folder runs/tiny
Hardware:   any CPU.
Wall time:  under a minute on 2 idle cores, nearly all of it compilation (50 s of processor time
            on a Zen 5 CPU, 2026-11-21).
To reach:   a pool that runs; its figures mean nothing.
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
    Trigrams,
)

RECIPE = Recipe(
    name="tiny",
    target=ModelConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=256,
        eos_ids=(0,),
    ),
    draft=Size(
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
    ),
    corpus=Corpus(max_files=24),
    pretrain=Reading(
        steps=60, batch=8, length=64, warmup_steps=5,
        decay_steps=20, dtype="float32", save_every=20, evaluate_every=20,
    ),
    warm=Reading(
        steps=30, batch=16, length=64, warmup_steps=5, decay_steps=10, dtype="float32",
        save_every=15, evaluate_every=15,
    ),
    collect=Collect(prompts=64, prompt_tokens=16, new_tokens=32, batch=32),
    labels=Labels(top_k=16, corpus_rows=16, corpus_length=48, tokens=768, dtype="float32"),
    schedule=Schedule(
        steps=30, batch=8, warmup_steps=5, decay_steps=10, dtype="float32",
        save_every=10, evaluate_every=15,
    ),
    distil=Distil(corpus_rows=2),
    boost=Boost(drafts=3, window=2),
    evaluation=Evaluation(prompts=32, prompt_tokens=16, new_tokens=32, batch=32, depth=4,
                          tables=("coverage",)),
    trigrams=Trigrams(contexts=300, width=4),
)  # fmt: skip
