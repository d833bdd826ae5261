"""Tokens per step and a second of every method and rule, group by group."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax

from benchmarks.cells import Cells, Json
from benchmarks.rounds import Contestant, Held, Ours, Rounds, Sampled, figures
from benchmarks.texts import Text
from specjax.checkpoints.pair import Pair
from specjax.decoding.generate import generate
from specjax.draft import Drafter
from specjax.methods import registry, tuned
from specjax.methods.method import METHODS, PLAIN, Setting
from specjax.verify.rules import AUTO, RULES, find_rule

ALL = "all"
"""The group of all texts."""
LEAST_TOKENS = 16
"""Of a text; a shorter answer is its prompt's time and little else."""


class Found(NamedTuple):
    """What was measured: cells of every contestant, in order, and the texts of each group."""

    held: Mapping[tuple[Sampled, str], Held]
    groups: Mapping[str, Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Measuring:
    """What every table needs.

    Attributes:
      cells: where runs are kept.
      pair: the target and what drafts for it.
      texts: with their lengths.
      seed: of all random numbers.
    """

    cells: Cells
    pair: Pair
    texts: Sequence[Text]
    seed: int = 0

    def ours(self, setting: Setting, rule: str = AUTO, name: str | None = None) -> Ours:
        """A setting as a contestant.

        Raises:
          ValueError: the pair lacks what it needs, or the rule is not lossless for its trees.
        """
        drafter = registry.build(setting, self.pair, verify=rule)
        found = find_rule(rule, drafter.construction)
        return Ours(
            name or named(setting, found.name), self.pair.target, drafter, setting, rule, self.seed
        )

    @property
    def plain(self) -> Ours:
        """Plain decoding."""
        return self.ours(Setting(), name="plain")

    def side_by_side(
        self,
        table: str,
        contests: Mapping[Sampled, Sequence[Contestant]],
        texts: Sequence[Text] | None = None,
    ) -> Found:
        """Runs contestants on texts; see `Rounds`."""
        texts = self.texts if texts is None else texts
        groups: dict[str, list[str]] = {ALL: []}
        for text in texts:
            groups[ALL].append(text.name)
            groups.setdefault(text.group, []).append(text.name)
        return Found(Rounds(self.cells, table, self.plain).run(contests, texts), groups)


def named(setting: Setting, rule: str) -> str:
    """A contestant's name: its tree, and its rule after a comma."""
    return f"{setting.label}, {rule}" if setting.method != PLAIN else "plain"


def sized(cells: Cells, pair: Pair, texts: Sequence[Text], most: int) -> list[Text]:
    """The texts, each as long as the target's own greedy answer, from `LEAST_TOKENS` to `most`.

    So all that is compared generates the same number of tokens, and none goes on long after its
    end.
    """

    def answer(text: Text) -> int:
        made = generate(
            jax.random.key(0), pair.target, None, [list(text.tokens)], max_new_tokens=most
        )
        return int(made.lengths[0])

    found = []
    for text in texts:
        key = {"prompt": list(text.tokens), "most": most}
        own = cells.get("length", key, lambda text=text: answer(text))
        length = max(min(LEAST_TOKENS, most), own)
        found.append(dataclasses.replace(text, new_tokens=length, room=most))
    return found


def settings_of(
    pair: Pair,
    methods: str = registry.ALL,
    budgets: Sequence[int] = (),
    config: Sequence[tuned.Entry] = (),
) -> list[Setting]:
    """The settings of methods, as shipped or within budgets, and what `tune` found.

    Args:
      pair: what is to run them.
      methods: names with commas between them; "all" are those that the pair can do.
      budgets: of nodes, for each method without a size that takes one.
      config: what `tune` wrote.

    Raises:
      ValueError: there is no such method.
    """
    drafts = len(pair.drafts)
    found = [entry.setting for entry in config if entry.setting.method != PLAIN]
    for name in registry.names_of(methods, pair):
        takes = budgets if name in METHODS and METHODS[name].takes_budget else ()
        found += [
            registry.setting_of(name, budget=each, drafts=drafts) for each in takes or (None,)
        ]
    return list(dict.fromkeys(found))


def contests(
    measuring: Measuring,
    settings: Iterable[Setting],
    temperatures: Sequence[float],
    all_rules: bool,
) -> dict[Sampled, list[Contestant]]:
    """Plain decoding and every setting: at temperature 0 with the rule that "auto" takes, as all
    decide alike there, above it with every rule that its trees allow, too.
    """
    settings = list(settings)
    found: dict[Sampled, list[Contestant]] = {}
    for temperature in temperatures:
        some: list[Contestant] = [measuring.plain]
        for setting in settings:
            rules = rules_of(measuring.pair, setting) if temperature and all_rules else [AUTO]
            some += [measuring.ours(setting, rule) for rule in rules]
        found[Sampled(temperature)] = some
    return found


def rules_of(pair: Pair, setting: Setting) -> list[str]:
    """The name "auto", and those of the other rules that are lossless for a setting's trees."""
    automatic = find_rule(AUTO, registry.build(setting, pair).construction)
    others = [
        rule.name
        for rule in RULES.values()
        if rule is not automatic and not rule.greedy_only and _fits(pair, setting, rule.name)
    ]
    return [AUTO, *others]


def _fits(pair: Pair, setting: Setting, rule: str) -> bool:
    drafter: Drafter = registry.build(setting, pair, verify=rule)
    return RULES[rule].refusal(drafter.construction) is None


def rows(found: Found) -> list[Json]:
    """A row for each contestant and group, in order."""
    made = []
    for (sampled, name), held in found.held.items():
        for group, members in found.groups.items():
            own = figures([held[member] for member in members])
            made.append({"sampled": sampled, "name": name, "group": group} | own)
    return made


def best(table: Sequence[Json], sampled: Sampled) -> str:
    """The name of the fastest over all texts, plain decoding included."""
    own = [row for row in table if row["sampled"] == sampled and row["group"] == ALL]
    return max(own, key=lambda row: row["speedup"])["name"]
