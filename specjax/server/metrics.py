"""Prometheus metrics under the names that dashboards for vLLM read, and some of our own."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specjax.engine.request import Statistics
from specjax.server.speculation_metrics import families

if TYPE_CHECKING:
    from specjax.engine.engine import Engine
    from specjax.engine.pages import PageCounts

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)  # fmt: skip
_BETWEEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)  # fmt: skip
_REQUEST = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)  # fmt: skip
_PARTS = (
    ("e2e_request_latency", "Seconds of a request", "came", "ended"),
    ("request_queue_time", "Seconds before it has a row", "came", "admitted"),
    ("request_prefill_time", "Seconds from its row to its first token", "admitted", "first"),
    ("request_decode_time", "Seconds from its first token to its last", "first", "last"),
    ("request_inference_time", "Seconds from its row to its last token", "admitted", "last"),
)
"""Times of a request: their names, what they are, and between what of `Times`."""
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


@dataclasses.dataclass
class Times:
    """When a choice came, got a row, had its first and its last tokens, and ended.

    By `time.monotonic()`; None for what did not happen.
    """

    came: float
    admitted: float | None = None
    first: float | None = None
    last: float | None = None
    ended: float | None = None


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def merged(expositions: Mapping[str, str]) -> str:
    """The metrics of several replicas as one text, with a label `replica`.

    Args:
      expositions: the metrics of each, as Prometheus reads them, by its name.
    """
    families: dict[str, list[str]] = {}
    for replica, text in expositions.items():
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith("#"):
                lines = families.setdefault(line.split()[2], [])
                if line not in lines:
                    lines.append(line)
            else:
                lines.append(line.replace("{", f'{{replica="{replica}",', 1))
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


class Metrics:
    """An engine's numbers and those of its requests, in a registry of their own.

    A request here is one choice: what runs in one row.

    Args:
      engine: whose statistics are read whenever the metrics are.
      model: the value of the label `model_name`.
    """

    def __init__(self, engine: "Engine", model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model))

        def histogram(name: str, text: str, buckets: Sequence[float | int]) -> Histogram:
            made = Histogram(name, text, ["model_name"], registry=self._registry, buckets=buckets)
            return made.labels(model)

        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "Seconds to the first token.", _FIRST_TOKEN
        )
        between = "Seconds between events of a request, each of a burst's tokens."
        self._between = [
            histogram("vllm:inter_token_latency_seconds", between, _BETWEEN),
            histogram("vllm:time_per_output_token_seconds", between, _BETWEEN),
        ]
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Seconds between a request's first token and its last, over their number but one.",
            _BETWEEN,
        )
        self._parts = [
            (histogram(f"vllm:{name}_seconds", f"{text}.", _REQUEST), begin, end)
            for name, text, begin, end in _PARTS
        ]
        self._prompt = histogram(
            "vllm:request_prompt_tokens", "Tokens of a request's prompt.", _TOKENS
        )
        self._generated = histogram(
            "vllm:request_generation_tokens", "Tokens given to a request.", _TOKENS
        )
        self._finished = Counter(
            "vllm:request_success",
            "Requests that ended, by how.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._longest_holds: dict[str, float] = {}
        self._holds = Gauge(
            "specjax:event_loop_held_seconds_max",
            "The longest time since the server was ready that the event loop was held.",
            ["model_name", "by"],
            registry=self._registry,
        )
        self._model = model

    def event_loop_held(self, *, clock: float, processor: float) -> None:
        """Notes for how many seconds the event loop answered nobody.

        Args:
          clock: by the clock, others' use of a busy machine included.
          processor: of its own thread.
        """
        for by, seconds in (("clock", clock), ("processor", processor)):
            if seconds > self._longest_holds.get(by, 0.0):
                self._longest_holds[by] = seconds
                self._holds.labels(self._model, by).set(seconds)

    def between_events(self, seconds: float) -> None:
        """Counts the time between two events of a request."""
        for histogram in self._between:
            histogram.observe(seconds)

    def finished(self, reason: str, prompt: int, generated: int, times: Times) -> None:
        """Counts a request that ended.

        Args:
          reason: why.
          prompt: tokens of its prompt.
          generated: tokens it was given.
          times: of what happened to it.
        """
        self._finished.labels(self._model, reason).inc()
        self._prompt.observe(prompt)
        self._generated.observe(generated)
        for part, begin, end in self._parts:
            since, until = getattr(times, begin), getattr(times, end)
            if since is not None and until is not None:
                part.observe(until - since)
        if generated > 1 and times.first is not None and times.last is not None:
            self._per_token.observe((times.last - times.first) / (generated - 1))

    def exposition(self) -> bytes:
        """All metrics as Prometheus reads them."""
        return generate_latest(self._registry)


_GAUGES: Sequence[tuple[str, str, Callable[["Engine"], float]]] = (
    ("num_requests_running", "Requests that have a row.", lambda e: e.num_requests_running),
    ("num_requests_waiting", "Requests that wait for one.", lambda e: e.num_requests_waiting),
    ("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all.", lambda e: e.kv_cache_usage),
)
_COUNTERS: Sequence[tuple[str, str, Callable[[Statistics], int]]] = (
    ("prompt_tokens", "Tokens of prompts.", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.generated_tokens),
    ("prefix_cache_queries", "Tokens of prompts looked for.", lambda s: s.prompt_tokens),
    ("prefix_cache_hits", "Tokens of prompts copied from a row.", lambda s: s.cached_tokens),
    ("spec_decode_num_drafts", "Steps of rows.", lambda s: s.steps),
    ("spec_decode_num_draft_tokens", "Drafted tokens.", lambda s: s.draft_tokens),
    ("spec_decode_num_accepted_tokens", "Accepted ones.", lambda s: s.accepted_tokens),
    ("requests_with_tpot_target", "Requests with max_tpot_ms.", lambda s: s.tpot_targets),
    ("requests_within_tpot_target", "Those that had their tokens in time.", lambda s: s.tpot_met),
)
_BY_POSITION = ("spec_decode_num_accepted_tokens_per_pos", "Accepted ones by depth, from 0.")


class _EngineCollector(Collector):
    """Reads the engine when Prometheus asks."""

    def __init__(self, engine: "Engine", model: str) -> None:
        self._engine = engine
        self._model = model

    def describe(self) -> Iterable[Metric]:
        """Nothing: the engine may not have started when this is registered."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The engine's gauges and counters, under vLLM's names and under ours."""
        statistics = self._engine.statistics()
        for prefix in ("vllm:", "specjax:"):
            for name, text, read in _GAUGES:
                gauge = GaugeMetricFamily(prefix + name, text, labels=["model_name"])
                gauge.add_metric([self._model], read(self._engine))
                yield gauge
            for name, text, count in _COUNTERS:
                counter = CounterMetricFamily(prefix + name, text, labels=["model_name"])
                counter.add_metric([self._model], count(statistics))
                yield counter
            yield self._by_position(prefix, statistics.accepted_at)
        matchers = GaugeMetricFamily(
            "specjax:grammar_matchers", "Rows that are held to a grammar.", labels=["model_name"]
        )
        matchers.add_metric([self._model], self._engine.num_grammar_matchers)
        yield matchers
        if (pages := self._engine.page_counts) is not None:
            yield from self._of_pages(pages)
        yield from families(self._engine.report(), self._model)

    def _of_pages(self, pages: "PageCounts") -> Iterable[Metric]:
        states = {"free": pages.free, "running": pages.running, "cached": pages.cached}
        gauge = GaugeMetricFamily(
            "specjax:kv_cache_pages", "Pages of the KV cache.", labels=["model_name", "state"]
        )
        for state, count in states.items():
            gauge.add_metric([self._model, state], count)
        yield gauge
        leaked = GaugeMetricFamily(
            "specjax:kv_cache_pages_leaked", "Pages that are lost.", labels=["model_name"]
        )
        leaked.add_metric([self._model], pages.leaked)
        yield leaked

    def _by_position(self, prefix: str, accepted_at: Sequence[int]) -> Metric:
        name, text = _BY_POSITION
        counter = CounterMetricFamily(prefix + name, text, labels=["model_name", "position"])
        for position, accepted in enumerate(list(accepted_at)):
            counter.add_metric([self._model, str(position)], accepted)
        return counter
