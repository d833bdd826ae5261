"""Figures that papers and repositories publish, each with where it is from.

Hardware and models differ from those measured here, so they say what shape a table has, not how
fast anything is.
"""

SPECINFER = "SpecInfer (arXiv 2305.09781v4), LLaMA-7B with LLaMA-68M"
COVERAGE = {
    (True, 1): "0.62 to 0.70",
    (True, 5): "0.85 to 0.89",
    (False, 1): "0.52 to 0.57",
    (False, 5): "0.96 to 0.97",
}
"""Its Table 1 over five data sets, by whether decoding is greedy, and k."""
WIDTHS = {(True, 1): 2.73, (True, 5): 3.91, (False, 1): 1.72, (False, 5): 2.29}
"""Tokens per step of its Table 2 (data set CIP, depth 8), by whether decoding is greedy, and the
width."""
RULES = {
    "naive": "1.87",
    "multi-step": "2.38",
}
"""Its Table 3: width 5, depth 8, Alpaca; 1.26 to 1.28 times on five data sets."""

SPECEXEC = (
    "SpecExec's repository (c7f24b3), sample run of its README; models and temperature not stated"
)
BUDGETS = {128: 6.68, 256: 7.65, 512: 7.99}
"""Tokens per step by budget."""
SPECEXEC_MOST = "up to 20 tokens a step (abstract of arXiv 2406.02532)"

STAGED = "Staged Speculative Decoding (arXiv 2308.04623), GPT-2-L 762M, draft 40M, RTX 4090"
STAGED_RATES = {
    ("greedy", "plain"): 150,
    ("greedy", "speculative"): 350,
    ("greedy", "staged"): 475,
    ("top-k 50", "plain"): 150,
    ("top-k 50", "speculative"): 219,
    ("top-k 50", "staged"): 298,
}
"""Tokens a second by how tokens are taken, and configuration."""
STAGED_TIMES = {("greedy", "staged"): 3.16, ("top-k 50", "staged"): 1.98}
"""Times plain decoding, as the paper has it."""

SMARTSPEC = (
    "up to 3.2 times lower mean latency than without drafts (abstract of arXiv 2406.14066); its "
    "figures by rate are not at hand as numbers"
)

SPEC_BENCH = "Spec-Bench's leaderboard, Vicuna-7B, greedy, A100"
SPEC_BENCH_SPEEDUPS = {
    "chain": (1.52, 2.28),
    "lookup": (1.66, 1.75),
    "recycle": (2.22, 2.73),
}
"""Speed-up and tokens per step by the method here that does the same: SpS, PLD, Token Recycling."""
