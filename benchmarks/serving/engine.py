"""An engine in this process against `generate`: clients, a burst of prompts, a long one beside.

    python -m benchmarks.serving.engine --clients 1 8 16 --json engine.json
    python -m benchmarks.serving.engine --inflate 8B --dtype bfloat16 --rows 32 --clients 1 8 32

Clients run in a closed loop: each has texts of its own continued, one after the other; `generate`
continues such texts in batches of as many rows. Each begins with a token of its own, so that none
takes over what another read. Both take turns; figures are medians, ratios those of the two in a
turn. No HTTP here: `benchmarks.serving.server` has it.
"""

import asyncio
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import tyro

import specjax
from specjax.checkpoints.pair import Pair, load_pair
from specjax.cli.values import count_of
from specjax.draft import Drafter
from specjax.engine.sequence import Sequence
from specjax.measure import prompts, timing
from specjax.methods import records, registry
from specjax.methods.switch import switching
from specjax.models.inflate import inflate

_LONG, _SHORT, _MATES = 1500, 200, 3
"""Tokens of the prompt that is read beside others, of other prompts at most, and how many those
are.
"""
_seeds = itertools.count()
"""Of what `generate` draws: as the engine's, no two of its texts are the same."""
_drawn = np.random.default_rng(0)


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is measured."""

    inflate: str | None = None
    """Grow the target of the bundled pair to so many parameters."""
    dtype: str = "float32"
    """Of its weights."""
    rows: int = 16
    """Of the engine."""
    clients: tuple[int, ...] = (1, 8, 16)
    """At once."""
    settings: tuple[str, ...] = ("none", "chain:7")
    """Each in an engine of its own."""
    auto: bool = False
    """Whether an engine that chooses among the settings is measured, too."""
    prompts: str | None = None
    """A file of texts (the bundled ones by default), of which at most 200 tokens are taken."""
    texts: int = 3
    """Of each client."""
    new: int = 128
    """Tokens after each."""
    temperatures: tuple[float, ...] = (0.0, 0.8)
    """Of all requests."""
    turns: int = 5
    """How often each side of a comparison runs."""
    json: Path | None = None
    """A file for the figures."""


def generated(
    pair: Pair,
    drafter: Drafter | None,
    batches: list[list[list[int]]],
    new: int,
    temperature: float,
) -> float:
    """Tokens a second of `generate`, which continues a batch after the other."""
    start = time.perf_counter()
    for batch in batches:
        specjax.generate(
            jax.random.key(next(_seeds)), pair.target, drafter, batch, max_new_tokens=new,
            sampling=specjax.Sampling(temperature), stop_at_eos=False,
        )  # fmt: skip
    return sum(map(len, batches)) * new / (time.perf_counter() - start)


def gaps_of(came: list[list[float]], start: float, end: float) -> tuple[list[float], list[float]]:
    """The gaps between events of streams, by when these came: those between two times, others."""
    inside, outside = [], []
    for times in came:
        at, gaps = np.array(times[1:]), np.diff(times)
        within = (at > start) & (at < end)
        inside += gaps[within].tolist()
        outside += gaps[~within].tolist()
    return inside, outside


@dataclasses.dataclass(frozen=True)
class Case:
    """An engine, what drafts in it, and the texts of its clients."""

    bench: Bench
    engine: specjax.Engine
    pair: Pair
    drafter: Drafter | None
    texts: list[list[int]]

    def batches(self, count: int) -> list[list[list[int]]]:
        """Of so many clients the texts that they have continued at a time, each behind a token that
        is drawn.
        """
        texts = itertools.cycle(self.texts)
        return [
            [[int(_drawn.integers(self.engine.vocab_size)), *text] for text in own]
            for _ in range(self.bench.texts)
            if (own := itertools.islice(texts, count))
        ]

    def request(self, tokens: list[int], temperature: float, new: int) -> specjax.Request:
        """A text's continuation by so many tokens, whatever ends it."""
        return specjax.Request(
            prompt=tokens, max_new_tokens=new, temperature=temperature, ignore_eos=True
        )

    async def _times(self, request: specjax.Request) -> list[float]:
        return [time.perf_counter() async for _ in self.engine.submit(request)]

    async def served(self, count: int, temperature: float) -> float:
        """Tokens a second of so many clients."""

        async def one(texts: tuple[list[int], ...]) -> None:
            for tokens in texts:
                await self._times(self.request(tokens, temperature, self.bench.new))

        start = time.perf_counter()
        await asyncio.gather(*(one(own) for own in zip(*self.batches(count), strict=True)))
        return count * self.bench.texts * self.bench.new / (time.perf_counter() - start)

    def generated(self, count: int, temperature: float) -> float:
        """Tokens a second of `generate` with the same texts."""
        batches = self.batches(count)
        return generated(self.pair, self.drafter, batches, self.bench.new, temperature)

    async def first_tokens(self, count: int) -> float:
        """Seconds to the first token, the mean of so many requests that come at once."""
        start = time.perf_counter()
        asked = [self.request(tokens, 0.0, 8) for tokens in self.batches(count)[0]]
        found = await asyncio.gather(*map(self._times, asked))
        return float(np.mean([times[0] for times in found])) - start

    async def beside_a_long_prompt(self, mates: int, prompt: list[int]) -> tuple[float, float]:
        """Of requests that decode, the median gap between bursts, and that of 99 % while a prompt
        is read.
        """
        longest = self.engine.max_model_len - _SHORT
        asked = [self.request(tokens, 0.8, longest) for tokens in self.batches(mates)[0]]
        running = [self.engine.submit(request) for request in asked]
        came: list[list[float]] = [[] for _ in running]

        async def mate(times: list[float], sequence: Sequence) -> None:
            times += [time.perf_counter() async for _ in sequence]

        tasks = [asyncio.create_task(mate(*each)) for each in zip(came, running, strict=True)]
        await asyncio.sleep(0.5)
        start = time.perf_counter()
        first = (await self._times(self.request(prompt, 0.8, 1)))[0]
        if any(each.finished for each in running):
            raise SystemExit("a request ended before the long prompt was read.")
        for each in running:
            each.abort()
        await asyncio.gather(*tasks)
        # The last event of each is that it was ended.
        beside, alone = gaps_of([times[:-1] for times in came], start, first)
        return float(np.median(alone)), float(np.quantile(beside, 0.99))


def rows_of(case: Case, name: str) -> list[dict[str, object]]:
    """What is found of an engine."""
    found: list[dict[str, object]] = []
    bench = case.bench
    for temperature, count in itertools.product(bench.temperatures, bench.clients):
        case.generated(count, temperature)  # compiles
        asyncio.run(case.served(count, temperature))
        both = np.array([
            (asyncio.run(case.served(count, temperature)), case.generated(count, temperature))
            for _ in range(bench.turns)
        ])  # fmt: skip
        ours, theirs = np.median(both, axis=0)
        ratio = float(np.median(both[:, 0] / both[:, 1]))
        found.append({
            "setting": name, "temperature": temperature, "clients": count, "engine": ours,
            "generate": theirs, "ratio": ratio,
        })  # fmt: skip
        print(f"{name}, T = {temperature}, {count} clients: engine {ours:.1f} tokens/s, generate "
              f"{theirs:.1f}, ratio {ratio:.3f}", flush=True)  # fmt: skip
    most = max(bench.clients)
    firsts = [asyncio.run(case.first_tokens(most)) for _ in range(bench.turns)]
    found.append({"setting": name, "clients": most, "first_token_seconds": np.median(firsts)})
    print(f"{name}: first token of {most} prompts that come at once after "
          f"{1e3 * np.median(firsts):.0f} ms", flush=True)  # fmt: skip
    if case.engine.max_model_len > _LONG + _SHORT and bench.rows > _MATES:
        noise = np.random.default_rng(0)
        prompt = noise.integers(0, case.engine.vocab_size, _LONG).tolist()
        gaps = [asyncio.run(case.beside_a_long_prompt(_MATES, prompt)) for _ in range(bench.turns)]
        median, worst = np.median(gaps, axis=0)
        found.append({"setting": name, "gap_seconds": median, "p99_beside_a_prompt": worst})
        print(f"{name}: gaps while a prompt of {_LONG} tokens is read, p99 {1e3 * worst:.1f} ms, "
              f"median without {1e3 * median:.1f}: {worst / median:.2f}", flush=True)  # fmt: skip
    return found


def engines(bench: Bench, pair: Pair) -> Iterator[tuple[str, Drafter | None]]:
    """What drafts in each engine, by its name."""
    for name in bench.settings:
        yield name, registry.build(registry.setting_of(name, drafts=len(pair.drafts)), pair)
    if bench.auto:
        yield "auto", switching(pair, bench.settings)


def loaded(bench: Bench) -> tuple[Pair, list[list[int]]]:
    """The pair, and the tokens of the texts."""
    pair = load_pair("bundled", dtype=bench.dtype)
    if bench.inflate:
        pair = pair._replace(target=inflate(pair.target, count_of(bench.inflate)))
    found = prompts.read(bench.prompts)
    return pair, [pair.tokenizer(text).input_ids[:_SHORT] for _, text in found]


def main() -> None:
    """Measures, prints it and writes it."""
    bench = tyro.cli(Bench, config=(tyro.conf.FlagCreatePairsOff,))
    records.use_compilation_cache()
    pair, texts = loaded(bench)
    found: list[dict[str, object]] = []
    whole = {"env": timing.environment(), "config": dataclasses.asdict(bench), "rows": found}
    for name, drafter in engines(bench, pair):
        engine = specjax.Engine(pair.target, drafter, rows=bench.rows)
        start = time.perf_counter()
        engine.start()
        seconds = time.perf_counter() - start
        print(f"{name}: ready after {seconds:.1f} s", flush=True)
        found.append({"setting": name, "start_seconds": seconds})
        found += rows_of(Case(bench, engine, pair, drafter, texts), name)
        engine.close()
        if bench.json is not None:
            bench.json.write_text(json.dumps(whole, indent=1, default=str) + "\n", "utf-8")


if __name__ == "__main__":
    main()
