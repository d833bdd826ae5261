"""How far passes, plain steps and whole generations are from the floor.

The floor of a pass is the time that reading its weights and the cache once takes, at the bandwidth
that the same run measured. Named shapes have random weights, for costs alone; the bundled pair,
its target grown without changing its function, is run end to end: against plain decoding, and
against transformers' plain and assisted generation where PyTorch is installed.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.base.pytree import replace
from specjax.checkpoints.pair import Pair
from specjax.decoding.request import prepare
from specjax.measure import timing, transformers_baseline
from specjax.measure.bench import Bencher
from specjax.measure.prompts import Prompt
from specjax.measure.rows import FailedRow, GenerationRow, PassRow, PlainStepRow, RooflineRow
from specjax.measure.workload import PLAIN_DTYPES, Workload
from specjax.methods import registry
from specjax.models.config import Experts, Latent, ModelConfig
from specjax.models.kv_cache import cache_dtype, empty_cache
from specjax.models.memory import load_of
from specjax.models.quantized import in_dtype
from specjax.models.transformer import Model, forward

SHAPES = {
    "llama-3.1-8b": ModelConfig(
        128_256, 4096, 14_336, 32, 32, 8, 128, 500_000.0, 1e-5, False, 131_072
    ),
    "llama-3.2-1b": ModelConfig(128_256, 2048, 8192, 16, 32, 8, 64, 500_000.0, 1e-5, True, 131_072),
    "qwen3-4b": ModelConfig(151_936, 2560, 9728, 36, 32, 8, 128, 1e6, 1e-6, True, 40_960),
    "qwen3-30b-a3b": ModelConfig(
        151_936, 2048, 6144, 48, 32, 4, 128, 1e6, 1e-6, False, 40_960, experts=Experts(128, 8, 768)
    ),
    "gpt-oss-20b": ModelConfig(
        201_088,
        2880,
        2880,
        24,
        64,
        8,
        64,
        150_000.0,
        1e-5,
        False,
        131_072,
        windows=(128, None) * 12,
        sinks=True,
        experts=Experts(32, 4, 2880),
    ),
    "deepseek-v2-lite": ModelConfig(
        102_400,
        2048,
        10_944,
        27,
        16,
        1,
        576,
        10_000.0,
        1e-6,
        False,
        163_840,
        rotary_dim=64,
        query_scale=192**-0.5,
        latent=Latent(512, 128, 128),
        experts=Experts(64, 6, 1408, norm_topk=False, shared_size=2816, dense_layers=(0,)),
        family="deepseek_v2",
    ),
}
"""The sizes of real models; what else tells them apart costs next to nothing."""
_ROUNDS = 7
_ROUND_SECONDS = 0.2
_STEPS = 64


def spent(work: Callable[[], Any]) -> float:
    """Seconds of a call, of many that are handed to the device at once: the median of 7 rounds."""
    jax.block_until_ready(work())
    _, one = timing.clocked(work)
    calls = max(3, round(_ROUND_SECONDS / one))
    rounds = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        jax.block_until_ready([work() for _ in range(calls)][-1])
        rounds.append((time.perf_counter() - begin) / calls)
    return statistics.median(rounds)


def passes(model: Model, nodes: tuple[int, ...], slots: int, bandwidth: float) -> Iterator[PassRow]:
    """A row for every number of nodes: a pass over them below `slots` cached tokens of one row."""
    config, dtype = model.config, cache_dtype(model.embedding.dtype)
    cache = empty_cache(config, 1, slots, dtype)
    cache = replace(cache, length=jnp.full(1, slots, jnp.int32))
    looked = jax.jit(forward)
    one = None
    for count in nodes:
        tokens = jax.random.randint(jax.random.key(count), (1, count), 0, config.vocab_size)
        positions = slots + jnp.arange(count, dtype=jnp.int32)[None]
        tree_mask = jnp.tri(count, dtype=bool)[None]

        def work(*at: jax.Array) -> Any:
            return looked(model, at[0], at[1], cache, at[2])[0]

        taken = spent(lambda at=(tokens, positions, tree_mask): work(*at))
        one = one or taken
        read = timing.weight_bytes(model, count) + load_of(model).caches(1, slots)
        floor = read / bandwidth
        yield PassRow(count, slots, taken, taken / one, taken / floor)


def plain_step(model: Model, slots: int, bandwidth: float) -> PlainStepRow:
    """A step of plain decoding inside the compiled loop, `slots` tokens into a text."""
    config = model.config
    text = jax.random.randint(jax.random.key(0), (slots,), 0, config.vocab_size).tolist()
    key = jax.random.key(0)
    asked, first = (
        prepare(key, model, None, [text], max_new_tokens=count, stop_at_eos=False)
        for count in (_STEPS + 1, 1)
    )
    first = first._replace(outputs=asked.outputs, slots=asked.slots)  # the same program
    timing.warm_up(first)
    pairs = [(timing.timed(asked)[1], timing.timed(first)[1]) for _ in range(_ROUNDS)]
    taken = statistics.median(all_of_it - start for all_of_it, start in pairs) / _STEPS
    held = load_of(model).caches(1, slots + _STEPS // 2)
    floor = (timing.weight_bytes(model) + held) / bandwidth
    return PlainStepRow(slots, taken, taken / floor)


class Generations(NamedTuple):
    """Texts that are made end to end, a row at a time."""

    prompts: Sequence[Prompt]
    methods: str
    temperatures: tuple[float, ...]
    max_new_tokens: int


def generations(pair: Pair, work: Generations, dtype: str) -> Iterator[RooflineRow]:
    """Rows of `bench` for the pair, then of transformers over the same weights.

    Plain decoding runs in both dtypes on a CPU alone: elsewhere half the bytes are the faster.
    """
    names = [name for name in registry.names_of(work.methods, pair) if name != "none"]
    settings = [registry.setting_of(name, drafts=len(pair.drafts)) for name in names]
    plain = PLAIN_DTYPES if jax.default_backend() == "cpu" else (dtype,)
    workload = Workload(
        work.prompts, {1: settings}, work.temperatures, (dtype,), work.max_new_tokens,
        plain_dtypes=plain,
    )  # fmt: skip
    found = Bencher(workload, pair).rows(1)
    for row in found:
        yield GenerationRow(
            row.setting.label, row.temperature, row.dtype, row.tokens_per_second, row.speedup,
            row.tokens_per_step,
        )  # fmt: skip
    try:
        yield from _peers(pair, work, dtype)
    except Exception as error:  # whatever another library raises, the rest goes on
        yield FailedRow("transformers", f"{type(error).__name__}: {error}")


def _peers(pair: Pair, work: Generations, dtype: str) -> Iterator[RooflineRow]:
    """Plain and assisted generation of transformers, each run once after a warm-up."""
    if not transformers_baseline.available():
        yield FailedRow("transformers", "PyTorch is not installed")
        return
    target, draft = (in_dtype(model, dtype) for model in (pair.target, pair.drafts[0]))
    generated = transformers_baseline.Peer(target, draft)
    texts = [prompt.tokens for prompt in work.prompts]
    for temperature in work.temperatures:
        plain = None
        for assisted in (False, True):
            generated.generate(texts[:1], 8, temperature, assisted)
            made = generated.generate(texts, work.max_new_tokens, temperature, assisted)
            rate = sum(map(len, made.outputs)) / made.seconds
            plain = plain or rate
            what = "transformers, assisted" if assisted else "transformers, plain"
            yield GenerationRow(
                what, temperature, dtype, rate, rate / plain, versions=generated.versions
            )


def costs_of_pair(
    pair: Pair, nodes: tuple[int, ...], slots: int, bandwidth: float, dtype: str
) -> Iterator[RooflineRow]:
    """The costs of a pair's target, below as many cached tokens as its context holds."""
    longest = pair.target.config.max_positions
    model = in_dtype(pair.target, dtype)
    return costs(model, nodes, min(slots, longest - _STEPS - 1 - max(nodes)), bandwidth)


def costs(
    model: Model, nodes: tuple[int, ...], slots: int, bandwidth: float
) -> Iterator[RooflineRow]:
    """The passes of a model, and its plain step."""
    yield from passes(model, nodes, slots, bandwidth)
    yield plain_step(model, slots, bandwidth)
