"""What the choice of settings believes and does, as metrics for Prometheus."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

_PREFIX = "specjax:speculation_"


def families(report: Mapping[str, Any], model: str) -> Iterable[Metric]:
    """The metrics of an engine's report (see `specjax.engine.report`)."""

    def gauge(name: str, text: str, labels: Sequence[str], values: Any) -> Metric:
        made = GaugeMetricFamily(_PREFIX + name, text, labels=["model_name", *labels])
        for own, value in values:
            if value is not None:
                made.add_metric([model, *own], value)
        return made

    steps = CounterMetricFamily(
        _PREFIX + "steps", "Steps by their setting.", labels=["model_name", "setting"]
    )
    for setting, count in report["steps_by_setting"].items():
        steps.add_metric([model, setting], count)
    yield steps
    last = report["history"][-1] if report["history"] else {}
    names = ("predicted_goodput", "goodput", "plain_goodput")
    yield gauge(
        "goodput_tokens_per_second", "Tokens a second of the last steps, predicted and realised.",
        ["kind"], (((name,), last.get(name)) for name in names),
    )  # fmt: skip
    yield gauge(
        "share_of_time", "Share of the steps' time spent on deciding and lost to probing.",
        ["part"], (((name,), value) for name, value in report["shares"].items()),
    )  # fmt: skip
    compiling, failed = report.get("settings_compiling", ()), report.get("settings_failed", ())
    yield gauge(
        "setting_joined", "Whether all programs of a setting are there.", ["setting"],
        (((name,), float(name not in compiling and name not in failed))
         for name in report["settings"]),
    )  # fmt: skip
    if "guard" in report:
        yield from _beliefs(report, gauge)


def _beliefs(report: Mapping[str, Any], gauge: Any) -> Iterable[Metric]:
    """Of an engine that chooses."""
    predicted = report["predicted"].items()
    for part in ("tokens", "seconds"):
        yield gauge(
            f"predicted_{part}", f"Predicted {part} of the next step.", ["setting"],
            (((name,), own[part]) for name, own in predicted),
        )  # fmt: skip
    yield gauge(
        "step_seconds", "Seconds of a step by its program, as believed.",
        ["setting", "rows", "width"],
        (((own["setting"], str(own["rows"]), str(own["width"])), own["seconds"])
         for own in report["costs"]),
    )  # fmt: skip
    yield gauge(
        "survival", "How often drafts survive to a depth, as believed of all requests.",
        ["method", "temperature", "depth"],
        (((own["method"], own["temperature"], str(depth)), alive)
         for own in report["acceptance"] for depth, alive in enumerate(own["survival"], 1)),
    )  # fmt: skip
    yield gauge(
        "calibration", "Logistic calibration of a draft's own probabilities.",
        ["temperature", "part"],
        (((own["temperature"], part), own[part])
         for own in report["calibration"] for part in ("intercept", "slope")),
    )  # fmt: skip
    yield gauge(
        "guard",
        "Whether speculation is off as it gave less than plain decoding, for how long, how often.",
        ["part"], (((name,), float(value)) for name, value in report["guard"].items()),
    )  # fmt: skip
