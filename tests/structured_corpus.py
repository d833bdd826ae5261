"""Texts under many schemas, each checked by the package jsonschema: none may be invalid.

    pip install jsonschema; tar xf jsonschema-*.tar.gz   # its source has the JSON Schema Test Suite
    python -m tests.structured_corpus jsonschema-*/json/tests/draft2020-12 --texts 5000

Files hold a schema each, or the suite's groups, each with one. Schemas that refer elsewhere or that
the compiler refuses are counted and left out. An engine continues a prompt under each of them, some
texts at a time, those of one schema after each other so that their prompt is read once; those that
end before `--new` tokens are whole, the others only counted. Settings take turns, also where the
engine would draft with none of them.
"""

import asyncio
import collections
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import tyro

import specjax
from specjax.base.progress import counted
from specjax.checkpoints.tokenizers import ids_of_talk
from specjax.methods.switch import switching
from tests.engines import collected, ids_of


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What is generated."""

    folder: tyro.conf.Positional[Path]
    """Of files of JSON."""
    model: str = "smollm2"
    settings: tuple[str, ...] = ("none", "chain:3", "ngram:7")
    texts: int = 5000
    new: int = 96
    temperature: float = 1.0
    rows: int = 8
    seconds: float = 0.5
    """Of a setting's turn."""


def schemas_in(folder: Path) -> Iterator[tuple[str, Any]]:
    """A name and a schema after another."""
    for file in sorted(folder.rglob("*.json")):
        value = json.loads(file.read_text("utf-8"))
        if isinstance(value, list):
            for group in value:
                yield f"{file.stem}: {group['description']}", group["schema"]
        else:
            yield file.stem, value


async def run(corpus: Corpus) -> int:
    """Generates, checks, prints; gives how many were invalid."""
    pair = specjax.load_pair(corpus.model)
    config, counts = pair.target.config, collections.Counter[str]()
    compiler = specjax.GrammarCompiler(pair.tokenizer, config.vocab_size, config.eos_ids)
    held = []
    for name, schema in schemas_in(corpus.folder):
        try:
            validator = jsonschema.validators.validator_for(schema)
            validator.check_schema(schema)
            held.append((name, validator(schema), compiler.json_schema(json.dumps(schema)), schema))
        except (ValueError, jsonschema.SchemaError) as error:
            counts["refused"] += 1
            counts[f"  {str(error)[:70]}"] += 1
    print(f"{len(held)} schemas; {counts['refused']} refused")
    engine = specjax.Engine(
        pair.target, switching(pair, corpus.settings), rows=corpus.rows, max_model_len=1024
    )
    await asyncio.to_thread(engine.start)
    room, wrong = asyncio.Semaphore(4 * corpus.rows), []

    async def one(number: int, done: Callable[[int, int], None]) -> None:
        name, validator, grammar, schema = held[number * len(held) // corpus.texts]
        asked = f"Write JSON that matches this schema: {json.dumps(schema)[:600]}"
        prompt = ids_of_talk(pair.tokenizer, [{"role": "user", "content": asked}])
        request = specjax.Request(
            prompt=prompt, max_new_tokens=corpus.new, temperature=corpus.temperature,
            grammar=grammar,
        )  # fmt: skip
        async with room:
            events = await collected(engine.submit(request))
        reason = events[-1].finish_reason
        counts[reason] += 1
        done(counts["stop"] + counts["length"], corpus.texts)
        if reason != "stop":
            return
        text = pair.tokenizer.decode(ids_of(events), skip_special_tokens=True)
        try:
            validator.validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as error:
            wrong.append(name)
            print(f"INVALID {name}: {text[:120]!r}: {str(error)[:120]}", flush=True)

    async def take_turns() -> None:
        for setting in itertools.cycle(corpus.settings):
            engine.fix(setting)
            await asyncio.sleep(corpus.seconds)

    turns = asyncio.create_task(take_turns())
    with counted("texts") as done:
        await asyncio.gather(*(one(number, done) for number in range(corpus.texts)))
    turns.cancel()
    speculation = engine.speculation.steps_by_setting
    engine.close()
    print({name: count for name, count in counts.items() if not name.startswith(" ")})
    print(f"{len(wrong)} invalid of {counts['stop']} whole texts; steps by setting {speculation}")
    return len(wrong)


if __name__ == "__main__":
    raise SystemExit(min(asyncio.run(run(tyro.cli(Corpus))), 1))
