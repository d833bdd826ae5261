"""What an engine reports of its steps and shows of its requests, made up."""

import time

from specjax.engine.watch import Watched, WatchedNode

SETTINGS = ["none", "chain:3", "specexec:15"]
HOSTILE = (
    "<img src=x onerror='window.hit=1'>\n\t<script>window.hit=1</script> &lt;b>\n"
    "def f(x):\n\treturn x  # é你👩‍👩‍👧 \u202eabc\n"
)


def span(ago, setting, goodput, plain=200.0):
    """Half a second of steps, of which a tenth less was realised than predicted."""
    return {
        "time": time.time() - ago, "setting": setting, "rows": 2, "width": 32, "nodes": 15.0,
        "steps": 50, "tokens": round(goodput * 0.45), "seconds": 0.5, "goodput": 0.9 * goodput,
        "predicted_goodput": goodput, "plain_goodput": plain,
    }  # fmt: skip


def report_of(**changes):
    """What an engine reports that chooses `specexec:15` after plain decoding."""
    history = [span(20 - at / 2, SETTINGS[2 * (at // 20)], 300.0 + at) for at in range(40)]
    forecast = {"tokens": 2.5, "seconds": 0.004, "goodput": 625.0}
    program = {"setting": "specexec:15", "rows": 2, "width": 32, "seconds": 0.0051, "steps": 9}
    return {
        "mode": "auto",
        "settings": SETTINGS,
        "now": time.time(),
        "steps": 1234,
        "decision": {"setting": "specexec:15", "rows": 2, "width": 32, "nodes": 30,
                     "reason": "guard", "predicted_goodput": 340.0},
        "predicted": dict.fromkeys(SETTINGS, forecast),
        "history": history,
        "guard": {"active": True, "steps_left": 12, "backoff_steps": 128, "times": 3},
        "shares": {"deciding": 0.004, "probing": 0.011},
        "costs": [program | {"seconds_per_cached_token": 8e-7, "measured_seconds": 0.005}],
        "acceptance": [{"method": "specexec:15", "temperature": "0", "survival": [0.91, 0.5],
                        "steps": 7}],
        "calibration": [{"temperature": "0", "intercept": 0.125, "slope": 0.75}],
    } | changes  # fmt: skip


def watched_of(tokenizer, row, text=HOSTILE, **changes):
    """A running request whose prompt and text are the same; two tokens of three were drafted."""
    ids = tokenizer(text).input_ids
    last = [tokenizer(each).input_ids[0] for each in ("def", "return", "\n", "<")]
    tree = [
        WatchedNode(last[0], -1, 1.0, True),
        WatchedNode(last[1], 0, 0.75, True),
        WatchedNode(last[2], 0, 0.2, False),
        WatchedNode(last[3], 1, 0.375, False),
    ]
    tokens = [(token, at % 3 > 0) for at, token in enumerate(ids)]
    made = Watched(f"req-{row}", row, ids, 0.8, 20.0, 40, 120, 80, tokens, "specexec:3", tree)
    return made._replace(**changes)
