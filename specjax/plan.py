"""What `specjax bench` is to measure: settings, temperatures, batches and dtypes."""

import dataclasses
from typing import NamedTuple

from specjax import curves, methods, tuned
from specjax.checkpoint import default_dtype
from specjax.distributed import sizes_of
from specjax.options import Bench
from specjax.pair import Pair
from specjax.setting import Setting
from specjax.sharding import DATA
from specjax.values import (
    at_least,
    check_seed,
    check_target_file,
    dtypes_of,
    items,
    temperatures_in,
)
from specjax.widths import read

PLAIN_DTYPES = ("float32", "bfloat16")
MIXED = "mixed"
_BATCHES = (1, 8)
Temperature = float | str


class Candidate(NamedTuple):
    """A setting at one dtype of the target."""

    setting: Setting
    dtype: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be measured, checked: the methods `names` as the options say, and `settings`.

    `drafts` share the budget of a pool; without `dtypes` the device's default is taken, once there
    is a device.
    """

    options: Bench
    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    dtypes: tuple[str, ...]
    names: tuple[str, ...]
    drafts: int
    settings: tuple[Setting, ...] = ()
    with_mixed: bool = True

    def candidates(self, batch: int) -> list[Candidate]:
        """Plain decoding in both dtypes, then the settings in the dtypes asked for."""
        plain = [Candidate(Setting(), dtype) for dtype in PLAIN_DTYPES]
        named = settings_of(self.options, self.names, batch, self.drafts)
        settings = dict.fromkeys((*self.settings, *named))
        dtypes = self.dtypes or (default_dtype(),)
        return plain + [Candidate(one, dtype) for dtype in dtypes for one in settings]

    def temperatures_of(self, batch: int) -> tuple[Temperature, ...]:
        """The temperatures; for a batch above 1 also half greedy and half sampled."""
        mixed = self.with_mixed and batch > 1 and max(self.temperatures) > 0
        return (*self.temperatures, MIXED) if mixed else self.temperatures


def plan_of(options: Bench, pair: Pair | None = None) -> Plan:
    """The plan that the options name; "all" are all methods, or those that `pair` can do.

    Raises:
      ValueError: an option is wrong.
    """
    at_least("--max-new-tokens", options.max_new_tokens, 1)
    at_least("--limit", options.limit, 1)
    check_seed(options.seed)
    curves.check(options.png)
    for name in ("json", "png"):
        check_target_file(f"--{name}", getattr(options, name))
    methods.check_rule(options.verify)
    batches = _batches(options)
    temperatures = temperatures_in(options.temperatures)
    for name in ("inflate", "profile"):
        if options.mesh is not None and getattr(options, name):
            raise ValueError(f"--{name} is for one device; leave out --mesh or it.")
    if options.verify == "greedy" and max(temperatures) > 0:
        raise ValueError(f"the greedy rule needs --temperatures 0, not {options.temperatures}.")
    dtypes = dtypes_of(options.dtype)
    names = tuple(name for name in methods.names_of(options.methods, pair) if name != "none")
    drafts = 1 if pair is None else len(pair.drafts)
    settings_of(options, names, batches[0], drafts)
    written = [] if options.config is None else tuned.read(options.config)
    settings = tuple(each.setting for each in written if each.setting.method != "none")
    return Plan(options, batches, temperatures, dtypes, names, drafts, settings)


def _batches(options: Bench) -> tuple[int, ...]:
    """Rows per batch; of the default ones those that a mesh divides.

    Raises:
      ValueError: one that is named is no number, or the mesh does not divide it.
    """
    rows = sizes_of(options.mesh).get(DATA, 1)
    if options.batch is None:
        return tuple(batch for batch in _BATCHES if batch % rows == 0) or (rows,)
    found = items(options.batch, int, "--batch")
    for batch in found:
        at_least("--batch", batch, 1)
        if batch % rows:
            raise ValueError(f"--mesh has data={rows}, which does not divide --batch {batch}.")
    return found


def settings_of(options: Bench, names: tuple[str, ...], batch: int, drafts: int) -> list[Setting]:
    """The settings to compare with plain decoding: shapes, or methods with every budget.

    Raises:
      ValueError: a method does not take what is named for it.
    """
    found = []
    if options.trees is not None:
        for named in options.trees.split(";"):
            method, _, widths = named.strip().partition(":")
            if method != "none":
                shape = read(widths, "--trees") if widths else None
                found.append(methods.setting_of(method, shape, None, batch, drafts))
        if options.budgets is None:
            return found
    budgets = (None,) if options.budgets is None else items(options.budgets, int, "--budgets")
    return found + [
        methods.setting_of(name, None, budget, batch, drafts)
        for name in names
        for budget in budgets
    ]
