"""What a model without a draft gains by methods that need none: measured once, and kept.

What a token tree of looked-up or recycled tokens gives depends on the text, and most answers repeat
little: there a step gives hardly more than a token. So nothing pays where a step with a few nodes
takes longer than a plain one by more than `LEAST_GAIN`, which two programs of a layer and a second
tell. Where nodes are cheaper, the model writes after a few prompts; the steps that decoding these
texts would have are costed by what passes, drafting and, for sampled rows, distributions take here.
A setting must then be faster than plain decoding on every text, and by `LEAST_GAIN` on the whole.
"""

import contextlib
import datetime
import importlib.resources
import json
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.base.progress import working
from specjax.base.pytree import replace
from specjax.base.sampling import Sampling, process
from specjax.checkpoints.pair import Pair
from specjax.checkpoints.tokenizers import encode, ids_of_talk
from specjax.decoding.pass_times import passes_seconds, seconds_of
from specjax.decoding.stepping import top_tokens_in
from specjax.methods import defaults, records
from specjax.methods.method import Setting
from specjax.methods.registry import build, setting_of
from specjax.methods.replay import Text, likeliest_along, replay, write
from specjax.methods.setting import from_json, to_json
from specjax.models import layers
from specjax.models.transformer import Model
from specjax.trees.widths import is_number

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

METHODS = ("lookup", "recycle")
BUDGETS = (3, 7, 15)
_QUESTIONS = (
    "Why do leaves change their colour in autumn?",
    "Write a short letter to a neighbour about a lost cat.",
    "How can I plan a week of simple dinners for two people?",
    "Explain in a few sentences how a bicycle stays upright.",
)
_EVERY = 6
"""Every sixth bundled prompt is written on beside the questions: code, mostly."""
_NEW, _SECONDS, _LEAST_NEW = 96, 4.0, 32
"""Tokens of each text, the seconds after which it ends, and how few do not count as one."""
_FREE = 1.02
"""Times a plain step that nodes may take where it is not known what they give."""
_LEAST_TEXTS = 4
_PROMPTS, _TOKENS = 16, 256
"""Bundled prompts, and their tokens, along which passes are timed and drafts compared where no text
is written."""
ANY = Text(tuple(range(32)), 1)
"""A text along which drafting is timed where there is none of the model's own."""
_SAMPLED = Sampling(0.8, 0, 0.9)
_PROMPT_COLUMNS = 64


class Candidate(NamedTuple):
    """A setting, what it costs, and what it gives.

    Attributes:
      setting: a method that needs no draft model.
      seconds: of a step.
      prompt: seconds that it takes longer to read a token of a prompt.
      tokens: per step, of each text; none where no text was written.
    """

    setting: Setting
    seconds: float
    prompt: float
    tokens: tuple[float, ...]


class Findings(NamedTuple):
    """What was measured of a model without a draft.

    Attributes:
      date: when.
      plain: seconds of a step that drafts nothing.
      least: of one with the fewest nodes, without drafting them.
      written: tokens of each text.
      found: what might pay.
    """

    date: str
    plain: float
    least: float
    written: tuple[int, ...]
    found: tuple[Candidate, ...]

    def gains(self, one: Candidate) -> list[float]:
        """Times plain decoding on each text, with as many tokens of prompts as are written."""
        return [self.plain / (one.seconds / tokens + one.prompt) for tokens in one.tokens]

    def gain(self, one: Candidate) -> float:
        """Times plain decoding on all texts, of which it takes the sum of the seconds."""
        if not one.tokens:
            return self.plain / (one.seconds + one.prompt)
        each = zip(self.written, self.gains(one), strict=True)
        return sum(self.written) / sum(count / gain for count, gain in each)

    def pays(self, one: Candidate) -> bool:
        """Whether a candidate is to be taken rather than plain decoding.

        Without texts only nodes that cost nothing are.
        """
        if not one.tokens:
            return one.prompt == 0 and one.seconds <= _FREE * self.plain
        return self.gain(one) >= defaults.LEAST_GAIN and min(self.gains(one)) >= 1

    def described(self, one: Candidate | None) -> str:
        """What was measured, of a candidate or of what every one needs."""
        if one is None:
            return (
                f"a step with {BUDGETS[0]} nodes took {self.least / self.plain:.2f} times as long "
                f"as a plain one of {self.plain * 1e3:.3g} ms on {self.date[:10]}, longer than it "
                "gives more on a text that repeats little"
            )
        label, longer = one.setting.label, one.seconds / self.plain
        cost = (
            f"a step of {label} takes {longer:.2f} times a plain one of {self.plain * 1e3:.3g} ms"
        )
        if not self.written:
            return f"{cost}, and the model wrote too little here to tell what it gives"
        tokens = one.seconds / (self.plain / self.gain(one) - one.prompt)
        return (
            f"{cost} and gives {tokens:.2f} tokens along {sum(self.written)} that the model wrote "
            f"on {self.date[:10]} after {len(self.written)} prompts, {self.gain(one):.2f} times "
            f"plain decoding ({min(self.gains(one)):.2f} on the text that gains least)"
        )

    def best(self, able: Sequence[Candidate]) -> Candidate | None:
        """The fastest of those that pay; without texts that with the most nodes."""
        paying = [one for one in able if self.pays(one)]
        if not self.written:
            return max(paying, key=lambda one: one.setting.nodes, default=None)
        return max(paying, key=self.gain, default=None)


def kind_of(temperature: float) -> float:
    """The temperature at which it is measured what rows of a temperature gain."""
    return 0.0 if temperature == 0 else max(0.8, math.ceil(round(temperature * 10, 6)) / 10)


def findings(pair: Pair, temperature: float, batch: int) -> Findings:
    """What was measured of such rows here, now or before."""
    kind = kind_of(temperature)
    name = f"{records.setting(pair.target, [], batch, kind > 0)}, temperature {kind:g}"
    if (kept := _of_json(records.recall_findings(name))) is not None:
        return kept
    found = measure(pair, kind, batch)
    with contextlib.suppress(OSError):  # it is measured anew then
        records.remember_findings(name, _to_json(found))
    return found


@working("measuring once what drafting without a draft model gains")
def measure(pair: Pair, temperature: float, batch: int) -> Findings:
    """Measures a plain step and every candidate; seconds, most of them compilation."""
    few = BUDGETS[0]
    text = bundled(pair).tokens
    steps = step_seconds(pair.target, (0, few), batch, temperature > 0, text)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    if steps[few] > defaults.LEAST_GAIN * steps[0]:
        return Findings(now, steps[0], steps[few], (), ())
    steps |= step_seconds(pair.target, BUDGETS[1:], batch, temperature > 0, text)
    plain = steps.pop(0)
    texts = texts_of(pair, temperature)
    found = [one for name in METHODS for one in _candidates(pair, name, texts, steps, batch)]
    written = tuple(text.written for text in texts)
    return Findings(now, plain, steps[few], written, tuple(found))


def step_seconds(
    target: Model,
    budgets: Sequence[int],
    batch: int,
    sampled: bool,
    text: Sequence[int] = (),
) -> dict[int, float]:
    """Seconds of a step without drafting, by the nodes of every row (see `passes_seconds`)."""
    dtype = target.embedding.dtype
    columns = {n: layers.fast_columns(batch * (n + 1), dtype) for n in budgets}
    taken = passes_seconds(target, [*columns.values()], text)
    return {n: taken[count] + _deciding(target, count, sampled) for n, count in columns.items()}


def _deciding(target: Model, columns: int, sampled: bool) -> float:
    """Seconds in which the distributions of nodes are made, with top-p as most ask for it."""
    if not sampled:
        return 0.0
    size = target.config.vocab_size
    return seconds_of(partial(_distributions, size=size), 1, columns)


@partial(jax.jit, static_argnames="size")
def _distributions(x: Float[Array, "E C"], size: int) -> Array:
    number = jnp.arange(x.shape[1] * size, dtype=jnp.float32).reshape(1, x.shape[1], size)
    return process(9 * jnp.sin(12.9898 * number) * x.mean(), _SAMPLED.rows(1))


def _candidates(
    pair: Pair, method: str, texts: Sequence[Text], steps: dict[int, float], batch: int
) -> list[Candidate]:
    """A method with each number of nodes whose steps were timed."""
    drafter = build(setting_of(method, budget=max(steps)), pair)
    count, own = drafter.wants.top_tokens, texts or [ANY]
    likeliest = likeliest_along(pair.target, own, count)
    replayed = replay(drafter, own, likeliest, [*steps], batch)
    prompt = _prompt_seconds(pair.target, count) if count else 0.0
    return [
        Candidate(
            setting_of(method, budget=nodes), taken + replayed.draft_seconds, prompt,
            replayed.tokens[nodes] if texts else (),
        )
        for nodes, taken in steps.items()
    ]  # fmt: skip


def _prompt_seconds(target: Model, count: int) -> float:
    """What it takes to find the target's likeliest tokens after a token of a prompt."""
    outer = replace(target, layers=())
    work = partial(_likeliest, outer, count=count)
    return seconds_of(work, target.config.hidden_size, _PROMPT_COLUMNS) / _PROMPT_COLUMNS


@partial(jax.jit, static_argnames="count")
def _likeliest(outer: Model, x: Float[Array, "E C"], count: int) -> Array:
    return top_tokens_in(outer, x, (1, x.shape[1]), count)


def texts_of(pair: Pair, temperature: float) -> list[Text]:
    """What the model writes after a few prompts, if it is fast enough and there is room for it."""
    room = pair.target.config.max_positions - _NEW
    prompts = [ids for ids in _prompts(pair.tokenizer) if 0 < len(ids) <= room]
    if not prompts:
        return []
    try:
        texts = write(pair.target, prompts, temperature, _NEW, _SECONDS)
    except ValueError:  # there is no memory for so many rows
        return []
    long = [text for text in texts if text.written >= _LEAST_NEW]
    return long if len(long) >= _LEAST_TEXTS else []


def _prompts(tokenizer: "PreTrainedTokenizerFast | None") -> list[list[int]]:
    """Questions and bundled prompts, each as a message where the model answers messages."""
    if tokenizer is None:
        return []
    return [_ids(tokenizer, text) for text in (*_QUESTIONS, *bundled_prompts()[::_EVERY])]


def bundled(pair: Pair) -> Text:
    """Bundled prompts one after the other, as if most of them had been written."""
    if pair.tokenizer is None:
        return ANY
    most = min(_TOKENS, pair.target.config.max_positions)
    text = "\n".join(bundled_prompts()[:_PROMPTS])
    tokens = pair.tokenizer(text, truncation=True, max_length=most).input_ids
    return Text(tuple(tokens), len(tokens) // 8)


def bundled_prompts() -> list[str]:
    """The texts of `prompts.jsonl`."""
    lines = (importlib.resources.files("specjax") / "prompts.jsonl").read_text("utf-8")
    return [json.loads(line)["prompt"] for line in lines.splitlines()]


def _ids(tokenizer: "PreTrainedTokenizerFast", text: str) -> list[int]:
    if not tokenizer.chat_template:
        return encode(tokenizer, text)
    try:
        return ids_of_talk(tokenizer, [{"role": "user", "content": text}])
    except ValueError:
        return encode(tokenizer, text)


def _to_json(found: Findings) -> dict[str, Any]:
    each = [{**one._asdict(), "setting": to_json(one.setting)} for one in found.found]
    return {**found._asdict(), "found": each}


def _of_json(values: Any) -> Findings | None:
    """What was written, or None if this version does not understand it."""
    match values:
        case {
            "date": str(date),
            "plain": plain,
            "least": least,
            "written": [*written],
            "found": [*found],
        } if all(is_number(each) and each > 0 for each in (plain, least, *written)):
            candidates = [_candidate(each, len(written)) for each in found]
            known = tuple(one for one in candidates if one is not None)
            if len(known) == len(candidates):
                return Findings(date, float(plain), float(least), tuple(written), known)
    return None


def _candidate(values: Any, texts: int) -> Candidate | None:
    match values:
        case {"setting": held, "seconds": seconds, "prompt": prompt, "tokens": [*tokens]} if (
            all(is_number(each) for each in (seconds, prompt, *tokens))
            and seconds > 0 <= prompt
            and min(tokens, default=1) >= 1
            and len(tokens) == texts
        ):
            try:
                setting = from_json(held, "what was measured")
            except ValueError:
                return None
            return Candidate(setting, float(seconds), float(prompt), tuple(map(float, tokens)))
    return None
