"""`specjax roofline`: how far passes, plain steps and whole generations are from the floor.

The floor of a pass is the time that reading its weights and the cache once takes, at the bandwidth
that the same run measured. Named shapes have random weights, for costs alone; the bundled pair,
its target grown without changing its function, is run end to end: against plain decoding, and
against transformers' plain and assisted generation where PyTorch is installed.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import Progress

from pallas_kernels.machine import read_bandwidth
from specjax import measure, peer, prompts
from specjax.bench import Bencher
from specjax.cache import cache_dtype, empty_cache
from specjax.checkpoint import default_dtype
from specjax.config import ModelConfig
from specjax.inflate import inflate
from specjax.model import Model, forward, initialize
from specjax.options import Bench, Roofline
from specjax.output import is_stream, tried, write_json
from specjax.pair import Pair, load_pair
from specjax.plan import plan_of
from specjax.prompts import Prompt
from specjax.pytree import replace
from specjax.request import Request, prepare
from specjax.sampling import Sampling
from specjax.values import at_least, budgets_of, check_target_file, count_of

SHAPES = {
    "llama-3.1-8b": ModelConfig(
        128_256, 4096, 14_336, 32, 32, 8, 128, 500_000.0, 1e-5, False, 131_072
    ),
    "llama-3.2-1b": ModelConfig(128_256, 2048, 8192, 16, 32, 8, 64, 500_000.0, 1e-5, True, 131_072),
    "qwen3-4b": ModelConfig(151_936, 2560, 9728, 36, 32, 8, 128, 1e6, 1e-6, True, 40_960),
}
"""The sizes of real models; what else tells them apart costs next to nothing."""
_ON_A_CPU = {"shapes": "", "inflate": "100M", "slots": 512}
_ELSEWHERE = {"shapes": "llama-3.1-8b,llama-3.2-1b", "inflate": "1B,8B", "slots": 4096}
_ROUNDS = 7
_ROUND_SECONDS = 0.2
_STEPS = 64

Row = dict[str, Any]


def spent(work: Callable[[], Any]) -> float:
    """Seconds of a call, of many that are handed to the device at once: the median of 7 rounds."""
    jax.block_until_ready(work())
    _, one = measure.clocked(work)
    calls = max(3, round(_ROUND_SECONDS / one))
    rounds = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        jax.block_until_ready([work() for _ in range(calls)][-1])
        rounds.append((time.perf_counter() - begin) / calls)
    return statistics.median(rounds)


def cache_bytes(config: ModelConfig, tokens: int, dtype: jnp.dtype) -> int:
    """Bytes of the keys and values of so many tokens of one row."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * tokens * dtype.itemsize


def passes(model: Model, nodes: tuple[int, ...], slots: int, bandwidth: float) -> Iterator[Row]:
    """A row for every number of nodes: a pass over them below `slots` cached tokens of one row."""
    config, dtype = model.config, cache_dtype(model.embedding.dtype)
    cache = empty_cache(config, 1, slots, dtype)
    cache = replace(cache, length=jnp.full(1, slots, jnp.int32))
    looked = jax.jit(forward)
    one = None
    for count in nodes:
        tokens = jax.random.randint(jax.random.key(count), (1, count), 0, config.vocab_size)
        positions = slots + jnp.arange(count, dtype=jnp.int32)[None]
        visible = jnp.tri(count, dtype=bool)[None]

        def work(*at: jax.Array) -> Any:
            return looked(model, at[0], at[1], cache, at[2])[0]

        taken = spent(lambda at=(tokens, positions, visible): work(*at))
        one = one or taken
        floor = (measure.weight_bytes(model) + cache_bytes(config, slots, dtype)) / bandwidth
        yield {
            "what": "pass", "nodes": count, "slots": slots, "seconds": taken,
            "over_the_first": taken / one, "over_floor": taken / floor,
        }  # fmt: skip


def plain_step(model: Model, slots: int, bandwidth: float) -> Row:
    """A step of plain decoding inside the compiled loop, `slots` tokens into a text."""
    config, dtype = model.config, cache_dtype(model.embedding.dtype)
    text = jax.random.randint(jax.random.key(0), (slots,), 0, config.vocab_size).tolist()
    asked = prepare(
        jax.random.key(0), model, None, [text], _STEPS + 1, Sampling(), "auto", stop_at_eos=False
    )

    def seconds(request: Request) -> float:
        return measure.timed(model, None, request).seconds

    first = asked._replace(limits=replace(asked.limits, max_new_tokens=jnp.int32(1)))
    seconds(first)
    pairs = [(seconds(asked), seconds(first)) for _ in range(_ROUNDS)]
    taken = statistics.median(all_of_it - start for all_of_it, start in pairs) / _STEPS
    held = cache_bytes(config, slots + _STEPS // 2, dtype)
    floor = (measure.weight_bytes(model) + held) / bandwidth
    return {"what": "plain step", "slots": slots, "seconds": taken, "over_floor": taken / floor}


def generations(pair: Pair, chosen: list[Prompt], options: Roofline, dtype: str) -> Iterator[Row]:
    """Rows of `specjax bench` for the pair, then of transformers over the same weights."""
    asked = Bench(
        methods=options.methods, temperatures=options.temperatures, batch="1", dtype=dtype,
        max_new_tokens=options.max_new_tokens, skip_phases=True,
    )  # fmt: skip
    plan = plan_of(asked, pair)
    with Progress(disable=True) as progress:
        found = Bencher(plan, pair, progress).rows(chosen, 1)
    kept = ("temperature", "dtype", "tokens_per_step", "tokens_per_second", "speedup")
    yield from ({"what": row["label"]} | {name: row[name] for name in kept} for row in found)
    try:
        yield from _peers(pair, chosen, options, plan.temperatures, dtype)
    except Exception as error:  # whatever another library raises, the rest goes on
        yield {"what": "transformers", "error": f"{type(error).__name__}: {error}"}


def _peers(
    pair: Pair, chosen: list[Prompt], options: Roofline, temperatures: Sequence[float], dtype: str
) -> Iterator[Row]:
    """Plain and assisted generation of transformers, each run once after a warm-up."""
    if not peer.available():
        yield {"what": "transformers", "error": "PyTorch is not installed"}
        return
    target, draft = (
        jax.tree.map(lambda leaf: leaf.astype(dtype), model)
        for model in (pair.target, pair.drafts[0])
    )
    told = peer.Peer(target, draft)
    texts = [prompt.tokens for prompt in chosen]
    for temperature in temperatures:
        plain = None
        for assisted in (False, True):
            told.generate(texts[:1], 8, temperature, assisted)
            made = told.generate(texts, options.max_new_tokens, temperature, assisted)
            rate = sum(map(len, made.outputs)) / made.seconds
            plain = plain or rate
            yield {
                "what": "transformers, assisted" if assisted else "transformers, plain",
                "temperature": temperature, "dtype": dtype, "tokens_per_second": rate,
                "speedup": rate / plain, **told.versions,
            }  # fmt: skip


def measured(options: Roofline) -> Iterator[Row]:
    """All rows, one after the other.

    Raises:
      ValueError: an option is wrong, or no prompt fits.
    """
    begin, on_cpu = time.monotonic(), jax.default_backend() == "cpu"
    shapes = options.shapes if options.shapes is not None else _default(on_cpu, "shapes")
    sizes = options.inflate if options.inflate is not None else _default(on_cpu, "inflate")
    slots = int(_default(on_cpu, "slots")) if options.slots is None else options.slots
    nodes = budgets_of(options.nodes, "--nodes")
    at_least("--slots", options.slots, 1)
    dtype, bandwidth = options.dtype or default_dtype(), read_bandwidth()
    yield {"what": "read bandwidth", "gb_per_second": bandwidth / 1e9}
    for name in filter(None, shapes.split(",")):
        if name not in SHAPES:
            raise ValueError(f"no shape {name!r}; there are {', '.join(SHAPES)}.")
        shape = partial(initialize, jax.random.key(0), SHAPES[name], jnp.dtype(dtype))
        if time.monotonic() - begin > options.seconds:
            yield {"model": name, "what": "owed"}
            continue
        for row in costs(shape(), nodes, slots, bandwidth):
            yield {"model": name, **row}
    for size in filter(None, sizes.split(",")):
        name = f"bundled, grown to {size}"
        if time.monotonic() - begin > options.seconds:
            yield {"model": name, "what": "owed"}
            continue
        pair = load_pair("bundled", None, "float32")
        pair = pair._replace(target=inflate(pair.target, count_of(size)))
        for row in of_pair(pair, nodes, slots, bandwidth, options, dtype):
            yield {"model": name, **row}


def of_pair(
    pair: Pair,
    nodes: tuple[int, ...],
    slots: int,
    bandwidth: float,
    options: Roofline,
    dtype: str,
) -> Iterator[Row]:
    """The costs of a pair's target, then its generations.

    Raises:
      ValueError: no prompt fits.
    """
    longest = pair.target.config.max_positions
    chosen, _ = prompts.fitting(
        prompts.read(options.prompts)[: options.limit], pair.tokenizer, longest,
        options.max_new_tokens,
    )  # fmt: skip
    model = jax.tree.map(lambda leaf: leaf.astype(dtype), pair.target)
    yield from costs(model, nodes, min(slots, longest - _STEPS - 1 - max(nodes)), bandwidth)
    del model
    yield from generations(pair, chosen, options, dtype)


def costs(model: Model, nodes: tuple[int, ...], slots: int, bandwidth: float) -> Iterator[Row]:
    """The passes of a model, and its plain step."""
    yield from passes(model, nodes, slots, bandwidth)
    yield plain_step(model, slots, bandwidth)


def _default(on_cpu: bool, name: str) -> Any:
    return (_ON_A_CPU if on_cpu else _ELSEWHERE)[name]


def line(row: Row) -> str:
    """A row as text."""
    shown = (
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if name not in ("model", "what")
    )
    return f"{row.get('model', ''):26} {row['what']:24} {'  '.join(shown)}"


def roofline(options: Roofline) -> int:
    """Runs `specjax roofline`, which writes and prints row by row; gives the exit code.

    Raises:
      ValueError: an option is wrong, or no prompt fits.
      OSError: standard output cannot be written; the file is.
    """
    check_target_file("--json", options.json)
    rows: list[Row] = []
    unread: OSError | None = None
    for row in measured(options):
        rows.append(row)
        if options.json and not is_stream(options.json):
            _write(options, rows, complete=False)
        try:
            print(line(row), flush=True)
        except OSError as error:  # nobody reads, but the file is still wanted
            if not options.json:
                raise
            unread = error
    written = not options.json or _write(options, rows, complete=True)
    if unread is not None:
        raise unread
    return 0 if written else 2


def _write(options: Roofline, rows: Sequence[Row], complete: bool) -> bool:
    """Writes the rows so far; whether it could, which a line on standard error says."""
    file = options.json
    assert file is not None
    report = {
        "complete": complete,
        "env": measure.environment(),
        "config": dataclasses.asdict(options),
        "rows": rows,
    }
    return tried(f"{file} cannot be written", lambda: write_json(file, report))
