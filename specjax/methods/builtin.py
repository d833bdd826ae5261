"""The methods there are: a record each, registered when this is imported."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.pair import Pair
from specjax.draft import Drafter, ExpansionDrafter
from specjax.draft.best_first import BestFirstDrafter
from specjax.draft.growth import Growth
from specjax.draft.hybrid import HybridDrafter
from specjax.draft.lookahead import LookaheadDrafter, Window
from specjax.draft.plain import PlainDrafter
from specjax.draft.prompt_lookup import TextDrafter
from specjax.draft.retrieval import RetrievalDrafter
from specjax.draft.staged import TableStage
from specjax.draft.suffix import SuffixDrafter, earlier
from specjax.draft.token_recycling import RecycleDrafter
from specjax.methods import defaults
from specjax.methods.method import (
    DRAFT,
    GROWTH,
    LEVELS,
    NO_SIZE,
    PLAIN,
    TABLE,
    WIDTHS,
    WINDOW,
    Method,
    Setting,
    Size,
    register_method,
)
from specjax.methods.sequoia import most_tokens
from specjax.models.transformer import Model
from specjax.parallel.mesh import mesh_of, settled
from specjax.trees.construction import DRAWN, TOP_K
from specjax.trees.tree import TreeShape
from specjax.trees.widths import Widths, canonical, spelled, widest
from specjax.verify.rules import AUTO, RULES, TRAVERSAL

_MAKE = (
    "make one: python -m train.run configs/boost/from_checkpoint.py target=MODEL corpus=FILES "
    "trigrams.contexts=16000 --stages tokenizer,collect,label,trigrams --folder RUN leaves it in "
    "RUN/trigrams-*/model (the methods lookup and recycle need none)"
)
"""What to do for an n-gram model where there is none."""


def _needs_draft(pair: Pair) -> str | None:
    return None if pair.drafts else "a draft model; name one with --draft"


def _needs_table(pair: Pair) -> str | None:
    return None if pair.table else f"an n-gram model; name its folder with --stage, or {_MAKE}"


def _needs_corpus(pair: Pair) -> str | None:
    return None if pair.corpus else "texts; name files of them with --stage"


def _needs_stage(pair: Pair) -> str | None:
    if missing := _needs_draft(pair):
        return missing
    if pair.drafts[0].config.features is not None:
        return "a draft that is a model of its own; the first one reads hidden states"
    if pair.table is None and pair.smaller is None:
        return f"a second stage; name an n-gram or model folder with --stage, or {_MAKE}"
    return None


def growth_of(budget: int) -> Growth:
    """How best-first trees of so many nodes grow (SpecExec, arXiv 2406.02532, algorithm 1)."""
    fitting = (size[1:] for size in defaults.GROWTH_SIZES if budget <= size[0])
    return Growth(budget, *next(fitting, defaults.LARGEST_GROWTH), defaults.DECAY)


def expansion(drafts: Sequence[Model], widths: Widths, verify: str) -> ExpansionDrafter:
    """Static trees with the children that a rule wants."""
    alone = verify == AUTO and len(drafts) == 1
    rule = TRAVERSAL if alone else RULES.get(verify)
    return ExpansionDrafter.of(drafts, widths, DRAWN if rule is None else rule.children)


def _widths_of(size: Size, method: str) -> Widths:
    return (defaults.WIDTHS if size.batch == 1 else defaults.WIDTHS_OF_MANY)[method]


def _budget_of(size: Size) -> int:
    default = defaults.BUDGET if size.batch == 1 else defaults.BUDGET_OF_MANY
    return size.budget or default


def _chain(size: Size) -> Setting:
    if size.widths is not None and widest(size.widths) > 1:
        raise ValueError(
            f"a chain has widths of 1, not {spelled(size.widths)}; use the method tree."
        )
    return _static("chain", size, lambda budget: (1,) * min(defaults.LONGEST_CHAIN, budget))


def _tree(size: Size) -> Setting:
    most = defaults.MOST_LEVELS["tree"]
    return _static("tree", size, lambda budget: _shaped(defaults.ACCEPTANCE, budget, most))


def _pool(size: Size) -> Setting:
    def share(budget: int) -> Widths:
        return (1,) * min(defaults.LONGEST_CHAIN, max(1, budget // max(1, size.drafts)))

    return _static("pool", size, share)


def _recycle(size: Size) -> Setting:
    most = defaults.MOST_LEVELS["recycle"]
    widths = size.widths or _shaped(defaults.RECYCLED, _budget_of(size), most)
    return Setting("recycle", canonical(widths))


def _static(method: str, size: Size, of_budget: Callable[[int], Widths]) -> Setting:
    widths = size.widths or (of_budget(size.budget) if size.budget else _widths_of(size, method))
    return Setting(method, canonical(widths))


def _shaped(acceptance: Any, budget: int, most: int) -> Widths:
    """The static tree that gives most tokens (Sequoia, arXiv 2402.12374, section 3.1)."""
    return most_tokens(acceptance, budget, min(budget, most)).shape.widths


def _grown(method: str) -> Callable[[Size], Setting]:
    """The settings of a method whose tree grows best first."""
    return lambda size: Setting(method, growth=growth_of(_budget_of(size)))


def _eagle(size: Size) -> Setting:
    """EAGLE-2's tree, as its released code grows it where nothing is named."""
    usual = defaults.EAGLE_LEVELS, defaults.EAGLE_TOP_K
    levels, width = (*size.numbers, *usual[len(size.numbers) :])
    growth = Growth(
        size.budget or defaults.EAGLE_NODES, width, width, levels, defaults.NO_DECAY, by_level=True
    )
    return Setting("eagle", growth=growth, temperatures=(1.0, 1.0))


def _lookahead(size: Size) -> Setting:
    """Windows as named, or as many columns as candidates of the n-grams that a budget has."""
    usual = Window(*(defaults.LOOKAHEAD if size.batch == 1 else defaults.LOOKAHEAD_OF_MANY))
    window = Window(*size.numbers) if size.numbers else usual
    if size.budget is not None:
        rows = min(usual.rows, max(1, size.budget // 4))
        candidates = size.budget // rows // 2
        window = Window(size.budget // rows - candidates, rows + 1, candidates)
    if window.tokens < 2:
        raise ValueError(f"n-grams of {window.tokens} tokens have none to draft; name 2 or more.")
    return Setting("lookahead", window=window)


def _staged(size: Size) -> Setting:
    growth = growth_of(_budget_of(size))
    growth = dataclasses.replace(growth, beams=max(growth.beams, defaults.STAGED_BEAMS))
    return Setting(
        "staged", None, growth, None, TABLE, defaults.STAGED_TREE, defaults.STAGED_FAN
    )  # fmt: skip


def _needed(setting: Setting, name: str) -> Any:
    value = getattr(setting, name)
    if value is None:
        raise ValueError(f"the method {setting.method} needs {name}; the setting names none.")
    return value


def _build_plain(setting: Setting, pair: Pair, verify: str) -> Drafter:
    del setting, verify
    return PlainDrafter(pair.target.config.vocab_size)


def _build_static(setting: Setting, pair: Pair, verify: str) -> Drafter:
    return expansion(pair.drafts[:1], _needed(setting, "widths"), verify)


def _build_pool(setting: Setting, pair: Pair, verify: str) -> Drafter:
    return expansion(pair.drafts, _needed(setting, "widths"), verify)


def _build_recycle(setting: Setting, pair: Pair, verify: str) -> Drafter:
    del verify
    shape = TreeShape(_needed(setting, "widths"))
    known = defaults.RECYCLED[: shape.widest]
    chance = jnp.zeros(shape.widest).at[: len(defaults.RECYCLED)].set(jnp.asarray(known))
    return RecycleDrafter(chance, shape, pair.target.config.vocab_size)


def _build_lookahead(setting: Setting, pair: Pair, verify: str) -> Drafter:
    del verify
    window, chance = _needed(setting, "window"), jnp.asarray(defaults.LOOKED_AHEAD, jnp.float32)
    return LookaheadDrafter(chance, window, pair.target.config.vocab_size)


def _build_text(setting: Setting, pair: Pair, verify: str) -> Drafter:
    del verify
    return TextDrafter(
        trust=jnp.asarray(defaults.TRUST, jnp.float32),
        table=pair.table if setting.method == "ngram" else None,
        growth=_needed(setting, "growth"),
        vocabulary=pair.target.config.vocab_size,
        least=defaults.SHORTEST_MATCH[setting.method],
        followers=defaults.FOLLOWERS[setting.method],
    )


def _build_retrieve(setting: Setting, pair: Pair, verify: str) -> Drafter:
    del verify
    assert pair.corpus is not None
    return RetrievalDrafter(
        pair.corpus, jnp.asarray(defaults.TRUST, jnp.float32), _needed(setting, "growth"),
        pair.target.config.vocab_size, defaults.SHORTEST_MATCH["retrieve"],
        defaults.FOLLOWERS["retrieve"],
    )  # fmt: skip


def _build_suffix(setting: Setting, pair: Pair, verify: str) -> Drafter:
    del verify
    nothing = jax.tree.map(jnp.asarray, earlier((), defaults.REMEMBERED))
    return SuffixDrafter(
        settled(nothing, mesh_of(pair.target)), jnp.asarray(defaults.TRUST, jnp.float32),
        _needed(setting, "growth"), pair.target.config.vocab_size,
        defaults.SHORTEST_MATCH["suffix"], defaults.FOLLOWERS["suffix"],
    )  # fmt: skip


def _best_first(
    setting: Setting,
    pair: Pair,
    table: TableStage | None = None,
    second: Drafter | None = None,
) -> BestFirstDrafter:
    config = pair.drafts[0].config
    usual = defaults.TEMPERATURES if config.features is None else defaults.HEAD_TEMPERATURES
    temperatures = jnp.asarray(setting.temperatures or usual, jnp.float32)
    growth, most = _needed(setting, "growth"), config.block_levels
    if most is not None:
        growth = dataclasses.replace(growth, depth=min(growth.depth, most))
    return BestFirstDrafter(pair.drafts[0], temperatures, growth, table, second)


def _build_specexec(setting: Setting, pair: Pair, verify: str) -> Drafter:
    del verify
    return _best_first(setting, pair)


def _build_hybrid(setting: Setting, pair: Pair, verify: str) -> Drafter:
    del verify
    trust = jnp.asarray(defaults.TRUST, jnp.float32)
    least, followers = defaults.SHORTEST_MATCH["hybrid"], defaults.FOLLOWERS["hybrid"]
    return HybridDrafter(_best_first(setting, pair), trust, None, least, followers)


def _build_staged(setting: Setting, pair: Pair, verify: str) -> Drafter:
    """The second stage is a table, or a smaller draft where that is asked for or all there is."""
    del verify
    if setting.stage == DRAFT and pair.smaller is None:
        raise ValueError("the setting asks for a smaller draft; name its folder with --stage.")
    if pair.table is None or setting.stage == DRAFT:
        assert pair.smaller is not None
        tree = setting.guess if setting.stage == DRAFT else None
        second = ExpansionDrafter.of([pair.smaller], tree or defaults.STAGED_DRAFT_TREE, TOP_K)
        return _best_first(setting, pair, None, second)
    shape = TreeShape(setting.guess or defaults.STAGED_TREE)
    return _best_first(
        setting, pair, TableStage(pair.table, shape, setting.fan or defaults.STAGED_FAN)
    )


_BUILTIN = (
    Method(
        name=PLAIN,
        summary="nothing: plain decoding through the same program",
        setting=lambda _: Setting(),
        build=_build_plain,
        takes_widths=False,
        takes_budget=False,
        size=NO_SIZE,
    ),
    Method(
        name="chain",
        summary="a static chain, drawn from one draft",
        source="Leviathan et al. (2211.17192)",
        setting=_chain,
        build=_build_static,
        lacks=_needs_draft,
        size=LEVELS,
    ),
    Method(
        name="tree",
        summary="a static tree, drawn from one draft",
        source="Sequoia (2402.12374)",
        setting=_tree,
        build=_build_static,
        lacks=_needs_draft,
        size=WIDTHS,
    ),
    Method(
        name="pool",
        summary="static trees of every draft of a boost-tuned pool, merged",
        source="SpecInfer (2305.09781)",
        setting=_pool,
        build=_build_pool,
        lacks=_needs_draft,
        size=WIDTHS,
    ),
    Method(
        name="specexec",
        summary="the likeliest nodes of one draft, grown best first",
        source="SpecExec (2406.02532)",
        setting=_grown("specexec"),
        build=_build_specexec,
        lacks=_needs_draft,
        takes_widths=False,
    ),
    Method(
        name="eagle",
        summary="the likeliest nodes of one draft, grown level by level",
        source="EAGLE-2 (2406.16858)",
        setting=_eagle,
        build=_build_specexec,
        lacks=_needs_draft,
        takes_widths=False,
        size=GROWTH,
    ),
    Method(
        name="staged",
        summary="the same in fewer passes of the draft, for which an n-gram model drafts",
        source="Staged (2308.04623)",
        setting=_staged,
        build=_build_staged,
        lacks=_needs_stage,
        takes_widths=False,
    ),
    Method(
        name="lookup",
        summary="prompt lookup: what followed the longest matches earlier in the text",
        source="Saxena 2023",
        setting=_grown("lookup"),
        build=_build_text,
        takes_widths=False,
    ),
    Method(
        name="ngram",
        summary="the same, backed off to an n-gram model",
        source="Katz 1987",
        setting=_grown("ngram"),
        build=_build_text,
        lacks=_needs_table,
        takes_widths=False,
    ),
    Method(
        name="retrieve",
        summary="what followed the longest match in a corpus, by how often it did",
        source="REST (2311.08252)",
        setting=_grown("retrieve"),
        build=_build_retrieve,
        lacks=_needs_corpus,
        takes_widths=False,
    ),
    Method(
        name="suffix",
        summary="what followed the longest matches in the text and in a server's earlier answers",
        source="SuffixDecoding (2411.04975)",
        setting=_grown("suffix"),
        build=_build_suffix,
        takes_widths=False,
        for_servers=True,
    ),
    Method(
        name="recycle",
        summary="static, of the target's top-k tokens where it last saw a token",
        source="Token Recycling (2408.08696)",
        setting=_recycle,
        build=_build_recycle,
    ),
    Method(
        name="lookahead",
        summary="n-grams of the target's own guesses, which each pass makes longer",
        source="Lookahead decoding (2402.02057)",
        setting=_lookahead,
        build=_build_lookahead,
        takes_widths=False,
        size=WINDOW,
    ),
    Method(
        name="hybrid",
        summary="specexec's tree and lookup's branches in one, under one budget",
        setting=_grown("hybrid"),
        build=_build_hybrid,
        lacks=_needs_draft,
        takes_widths=False,
    ),
)
for _method in _BUILTIN:
    register_method(_method)
