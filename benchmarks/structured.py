"""What grammars cost, and what drafts gain under them: tokens a second with one and without.

    python -m benchmarks.structured --model smollm2 --methods ngram:7 chain:3 --json structured.json

Each text answers a question with an object of a schema, or freely. Methods with and without a
grammar take turns within one process; figures are medians of turns, ratios those within a turn.
Of masks it says how many were looked for, and for how long on the host.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

import specjax
from specjax.base import grammars
from specjax.checkpoints.pair import Pair, load_pair
from specjax.checkpoints.tokenizers import ids_of_talk
from specjax.draft import Drafter
from specjax.measure import timing
from specjax.methods import records, registry

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "birth_year": {"type": "integer", "minimum": 1000, "maximum": 2025},
        "occupation": {"type": "string", "maxLength": 60},
        "known_for": {
            "type": "array", "items": {"type": "string", "maxLength": 60}, "minItems": 1,
            "maxItems": 3,
        },
        "is_alive": {"type": "boolean"},
    },
    "required": ["name", "birth_year", "occupation", "known_for", "is_alive"],
    "additionalProperties": False,
}  # fmt: skip
_PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "country": {"type": "string", "maxLength": 40},
        "population_in_millions": {"type": "number", "minimum": 0, "maximum": 50},
        "climate": {"enum": ["tropical", "dry", "temperate", "continental", "polar"]},
        "sights": {
            "type": "array", "minItems": 2, "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 40},
                    "kind": {"enum": ["museum", "park", "monument", "market", "other"]},
                },
                "required": ["name", "kind"], "additionalProperties": False,
            },
        },
    },
    "required": ["city", "country", "population_in_millions", "climate", "sights"],
    "additionalProperties": False,
}  # fmt: skip
ASKED = [
    *((f"Tell me about {name}, as JSON.", _PERSON) for name in (
        "Marie Curie", "Alan Turing", "Frida Kahlo", "Nelson Mandela")),
    *((f"Describe {name}, as JSON.", _PLACE) for name in ("Paris", "Nairobi", "Lima", "Osaka")),
]  # fmt: skip
"""Questions, and schemas of their answers."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is measured."""

    model: str = "smollm2"
    draft: str | None = None
    methods: tuple[str, ...] = ("ngram:7", "chain:3")
    rows: tuple[int, ...] = (1, 8)
    temperatures: tuple[float, ...] = (0.0, 0.8)
    new: int = 96
    """Tokens of an answer, at most."""
    turns: int = 3
    json: Path | None = None
    """A file for the figures."""


@dataclasses.dataclass
class Masks:
    """Masks that the host looked for: how many, in how many calls, and for how long."""

    count: int = 0
    calls: int = 0
    seconds: float = 0.0


class Case:
    """A pair, the questions' tokens, and their grammars."""

    def __init__(self, pair: Pair) -> None:
        self.pair, config = pair, pair.target.config
        compiler = specjax.GrammarCompiler(pair.tokenizer, config.vocab_size, config.eos_ids)
        self.prompts = [self._ids(text) for text, _ in ASKED]
        self.grammars = [compiler.json_schema(schema) for _, schema in ASKED]
        self.masks = Masks()
        grammars._ROWS.masks = self._timed(
            grammars._ROWS.masks, lambda asked, whole, _: whole[:, -asked.rest :] >= grammars.ROOT
        )
        grammars._ROWS.completed = self._timed(
            grammars._ROWS.completed, lambda asked, _, found: _parents(found, asked.nodes)
        )

    def _timed(self, look: Callable[..., None], looked_for: Callable[..., np.ndarray]) -> Any:
        """A look-up of masks that is counted: how many were looked for, and how long it took."""

        def timed(question: Any, whole: np.ndarray, found: np.ndarray) -> None:
            start = time.perf_counter()
            look(question, whole, found)
            self.masks.seconds += time.perf_counter() - start
            self.masks.calls += 1
            self.masks.count += int(looked_for(question, whole, found).sum())

        return timed

    def _ids(self, text: str) -> list[int]:
        if not self.pair.tokenizer.chat_template:
            return self.pair.tokenizer(text).input_ids
        return ids_of_talk(self.pair.tokenizer, [{"role": "user", "content": text}])

    def run(
        self, bench: Bench, drafter: Drafter | None, rows: int, temperature: float, held: bool
    ) -> tuple[float, float, list[str]]:
        """Tokens a second, tokens a step, and the texts."""
        tokens, steps, seconds, texts = 0, 0, 0.0, list[str]()
        for start in range(0, len(ASKED), rows):
            own = slice(start, start + rows)
            begin = time.perf_counter()
            made = specjax.generate(
                jax.random.key(start), self.pair.target, drafter, self.prompts[own],
                max_new_tokens=bench.new, sampling=specjax.Sampling(temperature),
                grammar=self.grammars[own] if held else None,
            )  # fmt: skip
            seconds += time.perf_counter() - begin
            tokens, steps = tokens + int(made.lengths.sum()), steps + int(made.steps.sum())
            texts += [
                "".join(self.pair.tokenizer.decode(text[:size], skip_special_tokens=True))
                for text, size in zip(made.tokens, made.lengths, strict=True)
            ]
        return tokens / seconds, tokens / steps, texts


def _parents(found: np.ndarray, nodes: int) -> np.ndarray:
    """Whether each node of completed trees is there, and the roots."""
    there = found[:, 2 * nodes : 3 * nodes] > grammars.NO_NODE
    return np.pad(there, ((0, 0), (1, 0)), constant_values=True)


def rows_of(bench: Bench, case: Case) -> Iterator[dict[str, Any]]:
    """The figures of each number of rows and temperature."""
    drafters: dict[str, Drafter | None] = {"none": None}
    for name in bench.methods:
        drafters[name] = registry.build(registry.setting_of(name), case.pair)
    for rows in bench.rows:
        for temperature in bench.temperatures:
            found = {(name, held): [] for name in drafters for held in (False, True)}
            masks = {name: Masks() for name in drafters}
            for turn in range(1 + bench.turns):  # the first compiles
                for (name, held), own in found.items():
                    case.masks = masks[name] if held and turn else Masks()
                    own.append(case.run(bench, drafters[name], rows, temperature, held))
            rates = {which: np.array([each[0] for each in own[1:]]) for which, own in found.items()}
            for (name, held), own in found.items():
                whole = [text for text in own[-1][2] if held and _is_json(text)]
                yield {
                    "rows": rows, "temperature": temperature, "method": name, "grammar": held,
                    "tokens_per_second": float(np.median(rates[name, held])),
                    "tokens_per_step": own[-1][1],
                    "times_plain": float(np.median(rates[name, held] / rates["none", held])),
                    "times_free": float(np.median(rates[name, held] / rates[name, False])),
                    "whole": len(whole) if held else None,
                    "mask_us": 1e6 * masks[name].seconds / max(masks[name].count, 1),
                    "call_us": 1e6 * masks[name].seconds / max(masks[name].calls, 1),
                }  # fmt: skip


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def main() -> None:
    """Measures, prints it and writes it."""
    bench = tyro.cli(Bench)
    records.use_compilation_cache()
    case, found = Case(load_pair(bench.model, bench.draft)), []
    for row in rows_of(bench, case):
        found.append(row)
        print(json.dumps(row), flush=True)
    if bench.json is not None:
        whole = {"env": timing.environment(), "config": dataclasses.asdict(bench), "rows": found}
        bench.json.write_text(json.dumps(whole, indent=1, default=str) + "\n", "utf-8")


if __name__ == "__main__":
    main()
