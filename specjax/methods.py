"""Named ways to draft, and the choice among them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax

from specjax import checkpoint, records
from specjax.draft import Drafter, ExpansionDrafter
from specjax.model import Model
from specjax.verify import DISTINCT, DRAWN, NAIVE, ONE_HOT, RECURSIVE, RULES, TOP_K, TRAVERSAL
from specjax.widths import Widths, of_json, spelled, widest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

METHODS = ("none", "chain", "tree", "pool")
AUTO = "auto"

# Widths where none are named: for one row, and for several. Chosen with `specjax bench` on its own
# prompts, bundled pair, 2 CPU cores (Zen 5), jax 0.10.2, 2026-11-21. A pass of 8 columns is where
# a chain's length stops paying: at temperature 0 chains of 3 / 5 / 7 / 10 gave 1.75 / 1.68 / 1.98 /
# 1.71 times plain decoding, at 0.8 1.29 / 1.11 / 1.28 / 1.02; grown to 100M in bfloat16, 7 was the
# best of 3 / 5 / 7 at 0.8 (2.14), and at 0 chains of 6 / 8 / 13 gave 3.05 / 3.29 / 3.43. For 8 rows
# chains of 1 / 2 / 3 / 5 gave 1.55 / 1.35 / 1.63 / 1.31. No tree or pool was faster than a chain.
_WIDTHS = {"chain": (1,) * 7, "tree": (2, 1, 1, 1, 1, 1, 1), "pool": (1,) * 5}
_WIDTHS_OF_MANY = {"chain": (1,) * 3, "tree": (2, 1), "pool": (1,)}
_SHIPPED = {("cpu", "greedy"): "chain", ("cpu", "sampling"): "chain"}
_SHIPPED_ELSEWHERE = "chain"

_CHILDREN = {
    NAIVE.name: TOP_K,
    ONE_HOT.name: TOP_K,
    RECURSIVE.name: DISTINCT,
    TRAVERSAL.name: DISTINCT,
}


class Choice(NamedTuple):
    """A method with its widths (None for plain decoding), and why it was taken."""

    method: str
    widths: Widths | None
    reason: str


class Pair(NamedTuple):
    """A target with its tokenizer, and the drafts that go with it."""

    target: Model
    tokenizer: "PreTrainedTokenizerFast"
    drafts: list[Model]


def check_method(name: str, *others: str) -> None:
    """Checks that `name` is a method, or one of `others`.

    Raises:
      ValueError: it is not.
    """
    if name not in (*others, *METHODS):
        raise ValueError(f"no method {name!r}; there are {', '.join((*others, *METHODS))}.")


def check_rule(name: str) -> None:
    """Checks that `name` is a verification rule.

    Raises:
      ValueError: it is not.
    """
    if name not in (AUTO, *RULES):
        raise ValueError(f"no verification rule {name!r}; there are auto, {', '.join(RULES)}.")


def default_widths(method: str, batch: int = 1) -> Widths | None:
    """The widths that `method` takes for `batch` rows when none are named."""
    return (_WIDTHS if batch == 1 else _WIDTHS_OF_MANY).get(method)


def build(
    method: str, drafts: Sequence[Model], widths: Widths | None, verify: str = AUTO
) -> Drafter | None:
    """The drafter that a method names; None for plain decoding.

    `chain` and `tree` take the first draft, `pool` all of them, each with these widths. Every rule
    gets the children of which it accepts most: naive and one-hot the most likely ones, recursive
    and traversal draws without replacement, the others independent draws.

    Raises:
      ValueError: the method is unknown or has no draft, or the widths are not a chain's.
    """
    check_method(method)
    if method == "none":
        if widths is not None:
            raise ValueError("the method none drafts nothing; it takes no tree.")
        return None
    if not drafts:
        raise ValueError(f"the method {method} needs a draft model; name one with --draft.")
    widths = widths or _WIDTHS[method]
    if method == "chain" and widest(widths) > 1:
        raise ValueError(f"a chain has widths of 1, not {spelled(widths)}; use the method tree.")
    children = _CHILDREN.get(verify, DRAWN)
    return ExpansionDrafter.of(drafts if method == "pool" else drafts[:1], widths, children)


def load_drafter(
    names: str | Path | Sequence[str | Path] = "bundled",
    widths: Widths | None = None,
    verify: str = AUTO,
    dtype: str | None = None,
) -> Drafter:
    """A pool of the drafts in a folder or several, or of all bundled ones.

    `widths` are those of each draft's tree (see `TreeShape`). Drafts stay float32 on a CPU, where
    small bfloat16 products are slow.

    Raises:
      CheckpointError: a folder, a file or a tensor is missing or not supported.
      ValueError: the drafts have different vocabularies.
    """
    drafter = build("pool", checkpoint.load_drafts(names, dtype), widths, verify)
    assert drafter is not None
    return drafter


def load_pair(model: str, draft: str | None, dtype: str | None) -> Pair:
    """The target and drafts that `--model` and `--draft` name (folders separated by commas).

    Without `draft`, the bundled target comes with the bundled drafts and any other with none.

    Raises:
      CheckpointError: a folder, a file or a tensor is missing or not supported.
      ValueError: a draft has another vocabulary than the target.
    """
    target, tokenizer = checkpoint.load(model, dtype)
    if draft is None and model != "bundled":
        return Pair(target, tokenizer, [])
    names = "bundled" if draft in (None, "bundled") else [name.strip() for name in draft.split(",")]
    drafts = checkpoint.load_drafts(names, None)
    check_vocabularies(target, drafts)
    return Pair(target, tokenizer, drafts)


def check_vocabularies(target: Model, drafts: Sequence[Model]) -> None:
    """Checks that all drafts have the target's vocabulary.

    Raises:
      ValueError: one has not.
    """
    for number, one in enumerate(drafts):
        if one.config.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"draft {number} has a vocabulary of {one.config.vocab_size} tokens and the model "
                f"one of {target.config.vocab_size}; they must be the same."
            )


def choose(
    method: str,
    widths: Widths | None,
    target: Model,
    drafts: Sequence[Model],
    temperature: float,
    batch: int = 1,
) -> Choice:
    """The method to use: the one named, or for `auto` the fastest measured here, or the shipped.

    A method that was measured as slower than plain decoding is never taken by `auto`. Where
    several temperatures above 0 were measured, the nearest one counts.

    Raises:
      ValueError: there is no such method.
    """
    check_method(method, AUTO)
    if method != AUTO:
        return Choice(method, widths or default_widths(method, batch), "it was asked for")
    if not drafts:
        return Choice("none", None, "there is no draft model")
    if widths is not None:
        named = "pool" if len(drafts) > 1 else "chain" if widest(widths) == 1 else "tree"
        return Choice(named, widths, "a tree was asked for")
    return _measured(target, drafts, temperature, batch) or _shipped(temperature > 0, batch)


def _measured(
    target: Model, drafts: Sequence[Model], temperature: float, batch: int
) -> Choice | None:
    """The fastest method of a measurement that included plain decoding, if there is one."""
    found = records.recall(records.setting(target, drafts, batch, temperature > 0))
    known = [entry for entry in found if entry["method"] in METHODS]
    nearest = min((entry["temperature"] for entry in known), default=temperature,
                  key=lambda measured: abs(measured - temperature))  # fmt: skip
    entries = [entry for entry in known if entry["temperature"] == nearest]
    plain = [entry["tokens_per_second"] for entry in entries if entry["method"] == "none"]
    if not plain:
        return None
    best = max(entries, key=lambda entry: entry["tokens_per_second"])
    widths = of_json(best["widths"]) if best["widths"] else None
    rate = f"{best['tokens_per_second']:.1f} tokens/s with it at temperature {nearest:g}"
    reason = f"bench measured {rate} on this machine"
    if best["method"] == "none":
        return Choice("none", None, f"{reason}, and no other method was faster")
    return Choice(best["method"], widths, f"{reason}, and {max(plain):.1f} with plain decoding")


def _shipped(sampled: bool, batch: int) -> Choice:
    platform, kind = jax.default_backend(), "sampling" if sampled else "greedy"
    method = _SHIPPED.get((platform, kind), _SHIPPED_ELSEWHERE)
    reason = f"the shipped default for {platform}, {kind}; run specjax bench to measure here"
    return Choice(method, default_widths(method, batch), reason)
