"""The tables of SpecInfer, SpecExec, Staged and SmartSpec, on one target with its drafts."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks.cells import Json
from benchmarks.rounds import Contestant, Ours, Sampled
from benchmarks.speed import ALL, Found, Measuring, rows
from benchmarks.texts import Text
from specjax.base.output import read_json
from specjax.base.sampling import Sampling
from specjax.decoding.generate import generate
from specjax.decoding.request import PROMPT_BUCKETS, bucket
from specjax.draft import ExpansionDrafter
from specjax.measure import timing
from specjax.methods import registry
from specjax.methods.method import Setting
from specjax.trees.construction import DISTINCT, DRAWN, TOP_K
from specjax.trees.widths import canonical
from specjax.verify.rules import MULTI_STEP, NAIVE, RULES
from train.collect import joined
from train.heldout import TOP, cover, view
from train.tables import BUSHY, CHAIN, FLAT, Shape, shown, wide

WIDTHS = range(1, 6)
PAPERS_CHAIN = (1,) * 6
"""Staged's baseline of one draft."""
PAPERS_NODES = 36
"""Nodes of Staged's trees."""
STAGED_SAMPLING = {"greedy": Sampled(0.0), "top-k 50": Sampled(1.0, 50)}


def coverage(
    measuring: Measuring, texts: Sequence[Text], temperatures: Sequence[float]
) -> list[Json]:
    """SpecInfer's Table 1: P(the target's token is among a draft's k most likely), k = 1 to 5.

    Along the target's own continuations; of each draft, and of all together.
    """
    made: list[Json] = []
    for temperature in temperatures:
        cells = []
        for text in texts:
            key = {"prompt": list(text.tokens), "new_tokens": text.new_tokens,
                   "temperature": temperature, "seed": measuring.seed}  # fmt: skip
            cells.append(
                measuring.cells.get(
                    "coverage",
                    key,
                    lambda text=text, temperature=temperature: _covered(
                        measuring, text, temperature
                    ),
                )
            )
            timing.forget_programs()
        count = sum(cell["tokens"] for cell in cells)
        for member in cells[0]["shares"]:
            sums = np.sum([np.array(c["shares"][member]) * c["tokens"] for c in cells], axis=0)
            tops = {f"top{k + 1}": float(each) / count for k, each in enumerate(sums)}
            made.append({"temperature": temperature, "of": member, "tokens": count} | tops)
    return made


def _covered(measuring: Measuring, text: Text, temperature: float) -> Json:
    """The shares of one continuation, by draft."""
    pair, new = measuring.pair, text.new_tokens
    made = generate(
        jax.random.key(measuring.seed), pair.target, None, [list(text.tokens)],
        max_new_tokens=new, sampling=Sampling(temperature),
    )  # fmt: skip
    width = bucket(len(text.tokens) + new, PROMPT_BUCKETS)
    same = np.array([temperature], np.float32)
    listed = joined([list(text.tokens)], made.tokens, made.lengths, same, width)
    tops = [view(draft, listed, pair.target).top for draft in pair.drafts]
    members = [(f"draft {number}", [top]) for number, top in enumerate(tops)]
    union = [("all drafts", tops)] if len(tops) > 1 else []
    shares = {
        name: cover(listed.following, listed.alive, chosen) for name, chosen in (*members, *union)
    }
    assert all(len(each) == TOP for each in shares.values())
    return {"tokens": int(made.lengths[0]), "shares": shares}


def widths(measuring: Measuring, texts: Sequence[Text], sampled: float) -> list[Json]:
    """SpecInfer's Table 2: trees ⟨1,1,k,1,1,1,1,1⟩ of the first draft, by multi-step sampling."""
    contests: dict[Sampled, list[Contestant]] = {
        Sampled(temperature): [
            static(measuring, wide(width), MULTI_STEP.name, DRAWN, name=str(width))
            for width in WIDTHS
        ]
        for temperature in dict.fromkeys((0.0, sampled))
    }
    return _of_all(measuring.side_by_side("width", contests, texts))


def rules(measuring: Measuring, texts: Sequence[Text], sampled: float) -> list[Json]:
    """SpecInfer's Table 3: every rule on trees of the same shapes, with the children that it wants,
    and naive sampling on each kind.
    """
    some: list[Contestant] = []
    for shape in (wide(5), BUSHY, FLAT, CHAIN):
        for children in (DRAWN, DISTINCT, TOP_K):
            if children == DISTINCT and max(shape[0]) == 1:
                continue  # as a draw
            trees = ExpansionDrafter.of(measuring.pair.drafts[:1], shape, children).construction
            for rule in RULES.values():
                wanted = rule is NAIVE or rule.children == children
                if wanted and not rule.greedy_only and rule.refusal(trees) is None:
                    name = f"{shown(shape)}; {children}; {rule.name}"
                    some.append(static(measuring, shape, rule.name, children, name))
    found = _of_all(measuring.side_by_side("rules", {Sampled(sampled): some}, texts))
    for row in found:
        parts = row["name"].split("; ")
        row |= dict(zip(("shape", "children", "rule"), parts, strict=True))
    return found


def static(measuring: Measuring, shape: Shape, rule: str, children: str, name: str) -> Ours:
    """A static tree of the first draft, with children made in a way that a rule is lossless for."""
    pair = measuring.pair
    drafter = ExpansionDrafter.of(pair.drafts[:1], shape, children)
    setting = Setting("tree", canonical(shape[0]))
    return Ours(name, pair.target, drafter, setting, rule, measuring.seed)


def budgets(
    measuring: Measuring,
    texts: Sequence[Text],
    counts: Sequence[int],
    temperatures: Sequence[float],
) -> list[Json]:
    """SpecExec's curve: best-first trees of growing budgets."""
    some: list[Contestant] = [
        measuring.ours(registry.setting_of(f"specexec:{count}"), name=str(count))
        for count in counts
    ]
    contests = {Sampled(temperature): some for temperature in temperatures}
    return _of_all(measuring.side_by_side("budgets", contests, texts))


def staged(measuring: Measuring, texts: Sequence[Text]) -> list[Json]:
    """Staged's configurations: no draft, one draft, a draft with a draft of its own."""
    chain = registry.setting_of("chain", widths=PAPERS_CHAIN)
    own = registry.setting_of(f"staged:{PAPERS_NODES}")
    some: list[Contestant] = [
        measuring.plain,
        measuring.ours(chain, name="speculative"),
        measuring.ours(own, name="staged"),
        measuring.ours(registry.setting_of("staged"), name="staged, as shipped"),
    ]
    contests = dict.fromkeys(STAGED_SAMPLING.values(), some)
    return _of_all(measuring.side_by_side("staged", contests, texts))


def served(measuring: Measuring, flags: Sequence[str]) -> list[Json]:
    """SmartSpec's rates: `specjax bench-serve`, a server under load at rates of requests.

    Raises:
      ValueError: it failed.
    """
    return measuring.cells.get("served", {"flags": list(flags)}, lambda: _bench_serve(flags))


def _bench_serve(flags: Sequence[str]) -> list[Json]:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "served.json"
        command = [sys.executable, "-m", "specjax", "bench-serve", *flags, "--json", str(file)]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            last = (ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()[-1]
            raise ValueError(f"specjax bench-serve failed: {last}")
        found = read_json(file)
    kept = ("rate", "rate_requests_per_s", "setting", "goodput_tokens_per_s", "mean_latency_s",
            "over_plain_goodput", "over_plain_latency", "tokens_per_step", "chosen")  # fmt: skip
    return json.loads(json.dumps([{name: row[name] for name in kept} for row in found["rows"]]))


def _of_all(found: Found) -> list[Json]:
    """The rows over all texts."""
    return [row for row in rows(found) if row["group"] == ALL]
