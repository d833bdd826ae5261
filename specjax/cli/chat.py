"""`specjax chat`: a conversation in the terminal, or over a pipe."""

import contextlib
import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from specjax.base.interrupts import CODE, if_interrupted
from specjax.base.output import reason, write_json
from specjax.base.progress import working
from specjax.base.sampling import Sampling
from specjax.checkpoints.files import find
from specjax.checkpoints.generation_config import defaults_for
from specjax.checkpoints.pair import Pair
from specjax.cli.generate import print_piece, read_standard_input, say, style_of, tree_text
from specjax.cli.kernels import check_kernels, use_kernels
from specjax.cli.loading import asked_of, pair_of
from specjax.cli.options import Chat
from specjax.cli.talk import Reply, Talk
from specjax.cli.values import at_least, check_seed, dtype_of, widths_of
from specjax.decoding.conversation import Conversation
from specjax.draft import Step
from specjax.measure import prompts
from specjax.methods import registry
from specjax.methods.choice import Choice, choose
from specjax.methods.method import check_method
from specjax.methods.setting import to_json
from specjax.methods.tuned import read
from specjax.models.quantized import quantized_as
from specjax.parallel.processes import devices_for
from specjax.verify.rules import AUTO, check_rule

_MOST_NEW = 512
"""Tokens of a reply where neither the options nor the model name a number."""

_QUOTES = '"""'
"""Stand around a message of several lines."""

_HELP = """  /stats        what the last reply cost, and what is held
  /tree         the token tree of the last step
  /system TEXT  another system message; without TEXT none
  /reset        forget what was said
  /save FILE    write what was said as JSON
  /help         this
  /exit         leave, as Ctrl-D does
Messages of several lines stand between lines of \"\"\". Ctrl-C stops a reply."""


def chat(options: Chat) -> int:
    """Runs `specjax chat`; gives the exit code.

    Raises:
      ValueError: an option is wrong, the pair does not fit, or it has no chat template; or, where
        nobody sits at a terminal, there is no reply to a message.
    """
    _check(options)
    first = read_standard_input() if options.prompt == "-" else options.prompt
    if first is not None:
        first = prompts.checked(first, "the message")
        if not first.strip():
            raise ValueError("the message is empty.")
    mesh = devices_for(options.mesh)
    use_kernels(options.kernels)
    defaults = defaults_for(options.generation_config, find(options.model).path)
    pair = pair_of(options, dtype_of(options.dtype), mesh)
    if not pair.tokenizer.chat_template:
        raise ValueError(
            f"{options.model} has no chat template, so it cannot chat; specjax generate continues "
            "a text with it."
        )
    for sentence in defaults.notices:
        say(sentence)
    given = _with_defaults(options, dict(defaults.values))
    asked = asked_of(options)
    sampling = Sampling(**{name: given[name] for name in _SAMPLING})
    choice = choose(asked, pair, float(given["temperature"]))
    conversation = Conversation(
        pair.target, registry.build(choice.setting, pair, verify=options.verify),
        max_model_len=options.max_model_len, verify=options.verify,
    )  # fmt: skip
    talk = Talk(
        pair.tokenizer, conversation, max_new_tokens=int(given["max_tokens"]), sampling=sampling,
        seed=options.seed,
    )  # fmt: skip
    if options.system is not None:
        talk.tell(options.system)
    say(f"method {choice.setting.label}: {choice.reason}.")
    pool = ThreadPoolExecutor(1, "specjax-chat")
    try:
        talk.ready = pool.submit(conversation.compile, sampling)  # people type meanwhile
        return _Terminal(options, pair, choice, talk).run(first)
    finally:
        pool.shutdown(wait=False)


_SAMPLING = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""How a reply is sampled where neither the options nor the model say it."""


def _with_defaults(options: Chat, own: dict[str, Any]) -> dict[str, Any]:
    """What replies are made with: the options, else the model's own file, else greedy."""
    asked = {name: getattr(options, name, None) for name in _SAMPLING}
    asked["max_tokens"] = options.max_new_tokens
    named = {name: value for name, value in asked.items() if value is not None}
    return {**_SAMPLING, "max_tokens": _MOST_NEW} | own | named


def _check(options: Chat) -> None:
    check_method(options.method, AUTO)
    check_kernels(options.kernels)
    check_rule(options.verify)
    at_least("--max-new-tokens", options.max_new_tokens, 1)
    if options.seed is not None:
        check_seed(options.seed)
    widths = widths_of(options.tree)
    if options.method != AUTO:
        registry.setting_of(options.method, widths=widths, budget=options.budget)
    if options.config is not None:
        read(options.config)


class _Interrupts:
    """Ctrl-C while a reply is made stops that; the third time, and else, it is raised."""

    def __init__(self) -> None:
        self.replying, self._times = False, 0

    @property
    def stopped(self) -> bool:
        """Whether it came since the reply began."""
        return self._times > 0

    @contextlib.contextmanager
    def noticed(self) -> Iterator[None]:
        """Has Ctrl-C come here, where this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._came)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _came(self, number: int, frame: FrameType | None) -> None:
        self._times += 1
        if not self.replying or self._times > 2:  # a compilation, or a template, may not end
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def while_replying(self) -> Iterator[None]:
        """A reply is made within."""
        self.replying, self._times = True, 0
        try:
            yield
        finally:
            self.replying = False


class _Terminal:
    """Lines that come in, and replies that go out."""

    def __init__(self, options: Chat, pair: Pair, choice: Choice, talk: Talk) -> None:
        self._options, self._pair, self._choice, self._talk = options, pair, choice, talk
        self._console = Console(highlight=False, soft_wrap=True)
        self._interrupts = _Interrupts()
        self._last: Reply | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/stats": self._stats, "/tree": self._tree, "/system": self._system,
            "/reset": self._reset, "/save": self._save, "/help": lambda _: _note(_HELP),
        }  # fmt: skip

    def run(self, first: str | None) -> int:
        """The whole conversation, beginning with a message if there is one; gives the exit code."""
        if_interrupted(lambda: "the conversation is not kept; /save FILE keeps one")
        at_terminal = sys.stdin is not None and sys.stdin.isatty()
        if first is not None and (self._options.json or not at_terminal):
            self._reply(first)
            return 0
        if not at_terminal:
            for line in _messages(_piped()):
                if not self._taken(line):
                    break
            return 0
        say("/help lists commands, Ctrl-C stops a reply, Ctrl-D leaves.")
        with self._interrupts.noticed():
            return self._people(first)

    def _people(self, first: str | None) -> int:
        """The same with somebody who reads sentences about what went wrong, and goes on."""
        if first is not None:
            self._tried(first)
        lines = _messages(_typed())
        left = False
        while True:
            try:
                line = next(lines, None)
            except KeyboardInterrupt:
                if left:
                    _note("")
                    return CODE
                _note("\n(Ctrl-C once more, Ctrl-D or /exit leaves.)")
                left, lines = True, _messages(_typed())
                continue
            except UnicodeDecodeError as error:
                say(f"the message is not {error.encoding}: byte {error.start} is not.")
                lines = _messages(_typed())
                continue
            left = False
            if line is None:
                _note("")
                return 0
            if not self._tried(line):
                return 0

    def _tried(self, line: str) -> bool:
        try:
            return self._taken(line)
        except (ValueError, OSError) as error:
            say(" ".join(str(error).split()))
            return True

    def _taken(self, line: str) -> bool:
        """Does what a line says; whether the conversation goes on."""
        found = re.fullmatch(r"(/[a-z]+)(?:\s+(.*))?", line.strip(), re.DOTALL)
        if found is None:
            if line.strip():
                self._reply(line)
            return True
        if found[1] in ("/exit", "/quit", "/bye"):
            return False
        if found[1] not in self._commands:
            raise ValueError(f"there is no command {found[1]}; /help lists them.")
        self._commands[found[1]](found[2] or "")
        return True

    def _reply(self, message: str) -> None:
        prompts.checked(message, "the message")
        with contextlib.ExitStack() as waiting, self._interrupts.while_replying():
            waiting.enter_context(working("reading the prompt"))

            def show(step: Step | None, pieces: list[str]) -> None:
                waiting.close()
                if not self._options.json:
                    for index, piece in enumerate(pieces):
                        style = "" if step is None else style_of(step, index)
                        print_piece(self._console, piece, style)
                    sys.stdout.flush()

            reply = self._talk.ask(message, show, lambda: self._interrupts.stopped)
        self._last = reply if reply.token_ids else self._last
        if self._options.json:
            print(json.dumps(self._answer(reply)), flush=True)
        elif reply.token_ids:
            print(flush=True)
        self._remark(reply)

    def _remark(self, reply: Reply) -> None:
        """What a reader would else not know of a reply."""
        if reply.dropped_messages:
            say(
                f"the context of {self._talk.conversation.max_model_len} tokens is full: the oldest"
                f" {reply.dropped_messages} messages were left out."
            )
        if not reply.token_ids:
            say("stopped before anything was written; the message is taken back.")
        elif reply.finish_reason == "interrupted":
            say("stopped; what was written stays in the conversation.")
        elif reply.finish_reason == "length":
            made, most = len(reply.token_ids), self._talk.max_new_tokens
            why = "--max-new-tokens names more" if made == most else "the context is full"
            say(f"the reply was cut off after {made} tokens; {why}.")

    def _answer(self, reply: Reply) -> dict[str, Any]:
        """What `--json` prints of a reply."""
        return {
            "text": reply.text,
            "token_ids": reply.token_ids,
            "new_tokens": len(reply.token_ids),
            "finish_reason": reply.finish_reason,
            "read_tokens": reply.read_tokens,
            "cached_tokens": reply.cached_tokens,
            "dropped_messages": reply.dropped_messages,
            "target_steps": reply.steps,
            "tokens_per_step": reply.tokens_per_step,
            "seconds_to_first_token": reply.seconds_to_first_token,
            "seconds": reply.seconds,
            "tokens_per_second": reply.tokens_per_second,
            "method": self._choice.setting.method,
            "setting": to_json(self._choice.setting),
            "verify": self._talk.conversation.rule.name,
            "dtype": str(self._pair.target.embedding.dtype),
            "quantization": quantized_as(self._pair.target),
        }

    def _stats(self, text: str) -> None:
        del text
        talk, last = self._talk, self._last
        if last is not None:
            _note(
                f"last reply: {len(last.token_ids)} tokens in {last.steps} steps, "
                f"{last.tokens_per_step:.2f} tokens per step, {last.tokens_per_second:.1f} "
                f"tokens/s, the first after {last.seconds_to_first_token:.2f} s; of its prompt "
                f"{last.read_tokens} tokens were read and {last.cached_tokens} held already"
            )
        held = len(talk.conversation.tokens)
        _note(
            f"conversation: {len(talk.whole())} messages, {held} of "
            f"{talk.conversation.max_model_len} tokens held; method {self._choice.setting.label}"
        )

    def _tree(self, text: str) -> None:
        del text
        step = None if self._last is None else self._last.last
        _note("no reply yet." if step is None else tree_text(step, self._pair.tokenizer))

    def _system(self, text: str) -> None:
        self._talk.tell(text or None)
        _note(f"system message: {text}" if text else "no system message.")

    def _reset(self, text: str) -> None:
        del text
        self._talk.reset()
        self._last = None
        _note("what was said is forgotten.")

    def _save(self, text: str) -> None:
        if not text:
            raise ValueError("/save needs the name of a file.")
        try:
            write_json(
                Path(text).expanduser(),
                {"model": self._options.model, "messages": self._talk.whole()},
            )
        except OSError as error:
            raise ValueError(f"{text} cannot be written: {reason(error)}.") from error
        _note(f"{len(self._talk.whole())} messages are in {text}.")


def _note(text: str) -> None:
    """Prints what a command says; standard output has nothing but replies."""
    print(text, file=sys.stderr, flush=True)


def _messages(lines: Iterator[str]) -> Iterator[str]:
    """Messages of lines: each is one, or what stands between lines of quotes."""
    for line in lines:
        if not line.strip().startswith(_QUOTES):
            yield line
            continue
        text = line.strip().removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            more = next(lines, None)
            if more is None:
                break
            text += f"\n{more}"
        yield text.rstrip().removesuffix(_QUOTES).strip("\n")


def _piped() -> Iterator[str]:
    """The lines of standard input that is no terminal."""
    try:
        for line in sys.stdin or ():
            yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the message on standard input is not {error.encoding}: byte {error.start} is not."
        ) from error


def _typed() -> Iterator[str]:
    """Lines that somebody types, with what readline gives where both ends are terminals."""
    with contextlib.suppress(ImportError):  # there is none on Windows
        import readline  # noqa: F401
    while True:
        try:
            if sys.stdout.isatty():
                yield input("> ")
            else:
                print("> ", end="", file=sys.stderr, flush=True)
                yield input()
        except EOFError:
            return
