"""Measured defaults of the methods, each with the run that it comes from.

"Bundled" is the pair that is installed, on 2 CPU cores (AMD EPYC, Zen 5) with jax 0.10.2. All were
chosen on the bundled prompts, unless another set is named; `specjax bench` and `specjax tune` find
those of another machine, pair or text.
"""

import numpy as np

from specjax.methods.acceptance import Measured
from specjax.trees.widths import Widths

SHIPPED = {("cpu", "greedy", True): "specexec"}
"""The method of `auto` where nothing was measured, by platform, kind of rows, and whether there is
one row. 40 prompts of HumanEval, bundled pair at 100M, bfloat16, 2026-11-21: specexec of 15 nodes
4.06 times plain decoding at temperature 0 and 1.41 at 0.8, a chain of 7 3.34 and 2.64."""
ELSEWHERE = "chain"
"""The method of `auto` where nothing else is known."""

LARGE_DRAFT = 1 / 4
"""Share of the target's parameters from which on it is measured what a draft gains."""
LEAST_WEIGHED = 50_000_000
"""Parameters of a target from which on that is measured of any draft: the shipped settings are
those of a smaller one, which takes less time than to measure it."""
LEAST_TIMED = 10_000_000
"""Parameters of a target below which its passes are not timed: of a smaller one a layer's start
would take most of the time, and in a whole program layers have none."""
LEAST_GAIN = 1.1
"""Times plain decoding below which nothing is drafted: what a draft gains is an estimate."""

WIDTHS: dict[str, Widths] = {"chain": (1,) * 7, "tree": (2, 1, 1, 1, 1, 1, 1), "pool": (1,) * 5}
WIDTHS_OF_MANY: dict[str, Widths] = {"chain": (1,) * 3, "tree": (2, 1), "pool": (1,)}
"""Children per level where none are named, for one row and for several. `specjax bench`, bundled,
2026-11-21. A pass of 8 columns is where a chain's length stops paying: at temperature 0 chains of
3 / 5 / 7 / 10 gave 1.75 / 1.68 / 1.98 / 1.71 times plain decoding, at 0.8 1.29 / 1.11 / 1.28 /
1.02; grown to 100M in bfloat16, 7 was the best of 3 / 5 / 7 at 0.8 (2.14), and at 0 chains of
6 / 8 / 13 gave 3.05 / 3.29 / 3.43. For 8 rows chains of 1 / 2 / 3 / 5 gave 1.55 / 1.35 / 1.63 /
1.31. No tree or pool was faster than a chain."""

BUDGET, BUDGET_OF_MANY = 15, 7
"""Nodes of a tree where none are named, for one row and for several (the same run)."""

LONGEST_CHAIN = 32
"""Levels of a static tree are unrolled, and nothing was ever accepted as deep."""

MOST_LEVELS = {"tree": 16, "recycle": 12}
"""Levels of a static tree that a budget shapes."""

TEMPERATURES = (0.35, 0.8)
"""Temperatures of a draft's distribution where it scores nodes, for greedy and for sampled rows:
tokens per step of best-first trees, naive rule, bundled, 2026-11-21. Greedy rows, 0.25 / 0.35 /
0.45 / 0.55: 6.87 / 7.03 / 6.83 / 6.41 with 15 nodes and 7.98 / 8.28 / 8.11 / 7.49 with 31. Rows at
0.8, 0.6 / 0.8 / 1 / 1.25: 2.15 / 2.17 / 2.16 / 2.14 and 2.27 / 2.32 / 2.31 / 2.28."""

HEAD_TEMPERATURES = (0.8, 0.8)
"""The same of a draft that reads hidden states: SmolLM2's head, specexec of 15 nodes along 24
answers to messages of `train.messages` (seed 99), greedy, 0.35 / 0.6 / 0.8 / 1: 2.70 / 2.84 / 2.90
/ 2.88 tokens per step (2026-11-30). EAGLE-2 has 1, which `eagle` keeps."""

NO_DECAY = 0.9999
"""The least that a level costs: a child's score is below its parent's."""

DECAY = 0.999
"""What a level costs a node's score: with 0.9 greedy rows of the run above gave 7.00 / 7.09 /
6.63 / 6.11 tokens per step with 15 nodes."""

GROWTH_SIZES = (
    (16, 1, 4, 16),
    (32, 4, 4, 16),
    (64, 8, 8, 16),
    (128, 16, 8, 24),
    (512, 32, 16, 24),
)
"""(Budget, beams, width, depth) of best-first growth, for budgets up to the first number. Beams
and width of 8 instead of 4 with 31 nodes: 8.28 tokens per step again, 2.43 at 0.8. Seconds with 1
beam over those with 4, 15 nodes, 8 prompts x 128 tokens each of HumanEval and of Spec-Bench at
temperatures 0 and 0.8, 2026-11-22: specexec 0.935, 0.934, 0.945, 0.936 and hybrid 0.897, 0.975,
0.939, 0.906 with tokens per step within 1 %; 8 rows, 7 nodes: 0.875, 0.929. Staged 0.974, 1.017 on
HumanEval. With 31 nodes 0.981, 0.981, 1.083 (Spec-Bench at 0)."""
LARGEST_GROWTH = (128, 32, 32)
"""Beams, width and depth above the last of these budgets (SpecExec's sizes)."""

EAGLE_NODES, EAGLE_LEVELS, EAGLE_TOP_K = 59, 8, 10
"""Nodes below the root, levels, and children of a node and nodes of a level that are expanded, of
EAGLE-2's released code: a total of 60 with the root, and 7 rounds after the first level."""

LOOKAHEAD, LOOKAHEAD_OF_MANY = (5, 4, 5), (2, 3, 2)
"""Columns, tokens of an n-gram and candidates of lookahead decoding, for one row and for several:
not measured against others."""
LOOKED_AHEAD = 0.4
"""How likely a token of a candidate is taken to be right."""

STAGED_BEAMS = 4
STAGED_TREE: Widths = (1, 1)
STAGED_FAN = 2
"""A staged draft's fewest beams, the tree of the n-gram stage, and the nodes of a round below which
it hangs: a pass of 8 columns, which is fast on a CPU."""
STAGED_DRAFT_TREE: Widths = (1,) * 6
"""The tree of a smaller draft as the second stage."""

TRUST = (0.0, 0.36, 0.59, 0.82, 0.83, 0.83, 0.86, 0.89, 0.96)
"""How often the most weighty follower of a match of 0 to 8 tokens is right at temperature 0,
measured along 24 x 128 of the bundled target's tokens, 2026-11-21. At 0.8: 0, 0.19, 0.32, 0.46,
0.62, 0.66, 0.58, 0.87, 0.56."""

ACCEPTANCE = Measured(
    np.array((0.733, 0.078, 0.037, 0.022)),
    np.array((0.715, 0.544, 0.446, 0.369, 0.31, 0.267, 0.231, 0.195, 0.166, 0.141, 0.125, 0.111,
              0.098, 0.086, 0.077, 0.069)),
).by_depth  # fmt: skip
"""How often a draft's token of each rank is accepted at 0.8, by depth (the same tokens; at 0: 0.88,
0.07, 0.02, 0.01 by rank, and 0.83, 0.69, 0.59, ... 0.36 survive)."""

RECYCLED = (0.44, 0.047, 0.02, 0.015, 0.013, 0.008, 0.008, 0.006)
"""How often the successor of each rank in the recycling table is right, the mean of temperatures 0
and 0.8 (the same tokens)."""

SHORTEST_MATCH = {"lookup": 1, "ngram": 2, "hybrid": 2, "retrieve": 2, "suffix": 1}
FOLLOWERS = {"lookup": 3, "ngram": 3, "hybrid": 2, "retrieve": 3, "suffix": 3}
"""Tokens that a match must have, and how many followers of it are drafted (the same run; those of
retrieve and suffix were not measured)."""

REMEMBERED = 1 << 16
"""Tokens of earlier answers that suffix drafts from: to order them takes a core 60 ms (an EPYC,
beside other work, 2026-11-29)."""
