"""What pages of the KV cache cost: engines with pages of some sizes, and with none, in turns.

    python -m benchmarks.serving.pages --clients 8 --page-sizes 0 64 128

Clients run in a closed loop, as in `benchmarks.serving.engine`; ratios are those to the first size
in the same turn, 0 being rows that have no pages.
"""

import asyncio
import contextlib
import dataclasses

import numpy as np
import tyro

import specjax
from benchmarks.serving.engine import Bench, Case, loaded
from specjax.methods import records, registry


@dataclasses.dataclass(frozen=True)
class Pages(Bench):
    """What is measured: the first of the clients and of the temperatures, in each setting."""

    rows: int = 8
    clients: tuple[int, ...] = (8,)
    page_sizes: tuple[int, ...] = (0, 64, 128)
    """Slots of a page in each engine."""


def main() -> None:
    """Measures and prints it."""
    bench = tyro.cli(Pages, config=(tyro.conf.FlagCreatePairsOff,))
    records.use_compilation_cache()
    pair, texts = loaded(bench)
    for name in bench.settings:
        drafter = registry.build(registry.setting_of(name, drafts=len(pair.drafts)), pair)
        with contextlib.ExitStack() as open_engines:
            cases = []
            for size in bench.page_sizes:
                engine = specjax.Engine(pair.target, drafter, rows=bench.rows, page_size=size)
                engine.start()
                open_engines.callback(engine.close)
                cases.append(Case(bench, engine, pair, drafter, texts))
            count, temperature = bench.clients[0], bench.temperatures[0]
            turns = range(bench.turns + 1)
            found = np.array(
                [[asyncio.run(each.served(count, temperature)) for each in cases] for _ in turns]
            )[1:]
        ratios = np.median(found / found[:, :1], axis=0)
        for size, rate, ratio in zip(
            bench.page_sizes, np.median(found, axis=0), ratios, strict=True
        ):
            print(f"{name}, {count} clients, pages of {size}: {rate:.1f} tokens/s, {ratio:.3f}")


if __name__ == "__main__":
    main()
