"""What the choice of settings believes and does, as plain values for whoever watches."""

import time
from typing import Any

from specjax.engine.device import Measured
from specjax.engine.speculation import Span, Speculation
from specjax.goodput.controller import Controller
from specjax.goodput.policy import Decision, Forecast


def report(speculation: Speculation, measured: Measured | None = None) -> dict[str, Any]:
    """All of it; of an engine with a single setting only what happens.

    Args:
      speculation: of the engine.
      measured: how long its programs took when it started, if it has.
    """
    controller, policy = speculation.controller, speculation.policy
    found: dict[str, Any] = {
        "mode": "auto",
        "settings": list(speculation.settings),
        "now": time.time(),
        "steps": speculation.steps,
        "steps_by_setting": dict(speculation.steps_by_setting),
        "decision": None,
        "predicted": {},
        "history": [_span(span) for span in list(speculation.spans)],
        "shares": _shares(speculation),
    }
    if controller is None:
        assert policy is None or not isinstance(policy, Controller)
        return found | {"mode": next(iter(speculation.settings))}
    return found | {
        "mode": controller.fixed or "auto",
        "decision": _decision(controller.last),
        "predicted": {name: _forecast(own) for name, own in controller.forecasts.items()},
        "guard": {
            "active": controller.guard.active,
            "steps_left": controller.guard.steps_left,
            "backoff_steps": controller.guard.backoff_steps,
            "times": controller.guard.times,
        },
        "costs": _costs(controller),
        "settings_without_columns": speculation.settings_without_columns,
        "chunks": [] if measured is None else _chunks(measured),
        "mixed": [] if measured is None else _mixed(measured),
        "catch_ups": [] if measured is None else _catch_ups(measured),
        "acceptance": _acceptance(controller),
        "calibration": _calibration(controller),
    }


def _shares(speculation: Speculation) -> dict[str, float]:
    seconds = max(speculation.seconds, 1e-9)
    controller = speculation.controller
    probing = 0.0 if controller is None else max(controller.probing_seconds, 0.0)
    return {"deciding": speculation.deciding_seconds / seconds, "probing": probing / seconds}


def _decision(decision: Decision | None) -> dict[str, Any] | None:
    if decision is None:
        return None
    forecast = decision.forecast
    return {
        "setting": decision.shape.setting,
        "rows": len(decision.depths),
        "width": decision.shape.width,
        "nodes": decision.shape.width - len(decision.depths),
        "reason": decision.reason,
        "predicted_goodput": None if forecast is None else forecast.goodput,
    }


def _forecast(forecast: Forecast) -> dict[str, float]:
    return {
        "tokens": forecast.tokens, "seconds": forecast.seconds, "goodput": forecast.goodput,
    }  # fmt: skip


def _span(span: Span) -> dict[str, Any]:
    return {
        "time": span.began,
        "setting": max(span.settings, key=span.settings.__getitem__, default=""),
        "steps": span.steps,
        "rows": span.rows,
        "width": span.width,
        "nodes": span.nodes / max(span.steps, 1),
        "tokens": span.tokens,
        "seconds": span.seconds,
        "predicted_goodput": _rate(span.predicted_tokens, span.predicted_seconds),
        "goodput": _rate(float(span.tokens), span.seconds),
        "plain_goodput": _rate(span.plain_tokens, span.plain_seconds),
    }


def _rate(tokens: float, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


def _costs(controller: Controller) -> list[dict[str, Any]]:
    return [
        {
            "setting": shape.setting,
            "rows": shape.rows,
            "width": shape.width,
            "seconds": cost.seconds * factor,
            "seconds_per_cached_token": cost.per_token * factor,
            "measured_seconds": cost.seconds,
            "steps": steps,
        }
        for shape, cost, factor, steps in controller.costs.table()
    ]


def _chunks(measured: Measured) -> list[dict[str, Any]]:
    return [
        {"tokens": size, "seconds": seconds, "seconds_per_cached_token": more}
        for size, (seconds, more) in measured.chunk_seconds.items()
    ]


def _mixed(measured: Measured) -> list[dict[str, Any]]:
    """What tokens of prompts add to steps that read them."""
    return [
        {"setting": shape.setting, "rows": shape.rows, "width": shape.width, "seconds_added": more}
        for shape, more in measured.mixed_seconds.items()
    ]


def _catch_ups(measured: Measured) -> list[dict[str, Any]]:
    return [
        {"tokens": size, "seconds": seconds} for size, seconds in measured.catch_up_seconds.items()
    ]


def _acceptance(controller: Controller) -> list[dict[str, Any]]:
    return [
        {
            "method": name,
            "temperature": temperature,
            "survival": list(curve.expected(0.0).survival),
            "steps": curve.steps,
        }
        for name, temperature, curve in controller.acceptance.table()
    ]


def _calibration(controller: Controller) -> list[dict[str, Any]]:
    return [
        {
            "temperature": "0" if greedy else "above 0",
            "intercept": own.intercept,
            "slope": own.slope,
            "fits": own.fits,
        }
        for greedy, own in controller.acceptance.calibrations.items()
    ]
