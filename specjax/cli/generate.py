"""`specjax generate`: text as it is committed, and what it cost."""

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from rich.console import Console
from rich.text import Text

from specjax.base.grammars import matchers_of
from specjax.base.interrupts import if_interrupted
from specjax.base.output import mixed
from specjax.base.progress import counted, hidden, working
from specjax.base.sampling import Sampling
from specjax.checkpoints.detokenizer import Detokenizer, TokenTexts
from specjax.checkpoints.pair import Pair
from specjax.checkpoints.tokenizers import encode, ids_of_talk
from specjax.cli.kernels import check_kernels, use_kernels
from specjax.cli.loading import asked_of, pair_of
from specjax.cli.options import Generate, Structured
from specjax.cli.values import at_least, check_seed, dtype_of, widths_of
from specjax.decoding.generate import following, steps_on_host
from specjax.decoding.request import Request, prepare
from specjax.draft import Step
from specjax.grammar.compiling import Grammar, GrammarCompiler
from specjax.measure import prompts, timing
from specjax.methods import registry
from specjax.methods.choice import Choice, choose
from specjax.methods.method import check_method
from specjax.methods.setting import to_json
from specjax.methods.tuned import read
from specjax.models.quantized import quantized_as
from specjax.parallel.processes import devices_for
from specjax.trees.tree import draw_tree, take_row
from specjax.verify.rules import AUTO, check_rule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")


def generate(options: Generate) -> int:
    """Runs `specjax generate`; gives the exit code.

    Raises:
      ValueError: an option is wrong, the pair does not fit, or the prompt does not.
    """
    _check(options)
    prompt = (
        read_standard_input()
        if options.prompt == "-"
        else prompts.checked(options.prompt, "the prompt")
    )
    mesh = devices_for(options.mesh, options.distributed)
    use_kernels(options.kernels)
    pair = pair_of(options, dtype_of(options.dtype), mesh)
    asked = asked_of(options)
    choice = choose(asked, pair, options.temperature)
    drafter = registry.build(choice.setting, pair, verify=options.verify)
    ids = _ids(options, pair.tokenizer, prompt)
    matchers = matchers_of(grammar_of(options, pair), 1)
    request = prepare(
        jax.random.key(options.seed), pair.target, drafter, [ids],
        max_new_tokens=options.max_new_tokens, sampling=_sampling(options),
        verify=options.verify, has_grammar=matchers[0] is not None,
    )  # fmt: skip
    say(f"method {choice.setting.label}: {choice.reason}.")
    with following(request, matchers) as own:
        if options.json:
            print(json.dumps(_answer(pair, choice, ids, own)))
        else:
            _narrate(options, pair, prompt, ids, own)
    return 0


def grammar_of(options: Structured, pair: Pair) -> Grammar | None:
    """What a text must match, compiled for a pair's model; None if nothing says so.

    Raises:
      ValueError: several options say it, a file cannot be read, or what it says is refused.
    """
    named = {name: value for name in ("schema", "regex", "choice", "grammar")
             if (value := getattr(options, name)) is not None}  # fmt: skip
    if not named:
        return None
    if len(named) > 1:
        first, second = list(named)[:2]
        raise ValueError(f"--{first} and --{second} both say what the text must match; name one.")
    ((name, value),) = named.items()
    config = pair.target.config
    compiler = GrammarCompiler(pair.tokenizer, config.vocab_size, config.eos_ids)
    match name:
        case "schema":
            return compiler.json_schema(read_standard_input() if value == "-" else _read(value))
        case "regex":
            return compiler.regex(value)
        case "choice":
            return compiler.choice(value)
    return compiler.grammar(_read(value))


def _read(file: str) -> str:
    try:
        return Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}.") from error


def read_standard_input() -> str:
    """The prompt on standard input.

    Raises:
      ValueError: there is none, or it is no text.
    """
    if sys.stdin is None:  # it was closed before this process began
        raise ValueError("the prompt is -, and there is no standard input.")
    what = "the prompt on standard input"
    try:
        return prompts.checked(sys.stdin.read(), what)
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not {error.encoding}: byte {error.start} is not.") from error


def _ids(options: Generate, tokenizer: "PreTrainedTokenizerFast", prompt: str) -> list[int]:
    if not options.chat:
        if tokenizer.chat_template:
            say(
                f"{options.model} has a chat template, which a plain prompt leaves out; --chat puts"
                " the prompt into it, and specjax chat holds a conversation."
            )
        return encode(tokenizer, prompt, what="the prompt")
    if not tokenizer.chat_template:
        raise ValueError(f"--chat needs a chat template, and {options.model} has none.")
    return ids_of_talk(tokenizer, [{"role": "user", "content": prompt}])


def _check(options: Generate) -> None:
    check_method(options.method, AUTO)
    check_kernels(options.kernels)
    check_rule(options.verify)
    at_least("--max-new-tokens", options.max_new_tokens, 1)
    check_seed(options.seed)
    if options.json and options.show_tree:
        raise ValueError("--show-tree draws beside the text; it does not go with --json.")
    widths = widths_of(options.tree)
    if options.method != AUTO:
        registry.setting_of(options.method, widths=widths, budget=options.budget)
    if options.config is not None:
        read(options.config)


def _sampling(options: Generate) -> Sampling:
    return Sampling(options.temperature, options.top_k, options.top_p, options.min_p)


def say(sentence: str) -> None:
    """Prints a remark beside the result, in the first of several processes."""
    if jax.process_index() == 0:
        print(f"specjax: {sentence}", file=sys.stderr, flush=True)


def _answer(pair: Pair, choice: Choice, ids: list[int], request: Request) -> dict[str, Any]:
    """What `--json` prints; the program is compiled before the clock starts."""
    with working("compiling, and reading the prompt"):
        timing.warm_up(request)
    with working(f"writing up to {request.outputs} tokens"):
        made, seconds = timing.timed(request)
    count, steps = int(made.lengths[0]), int(made.steps[0])
    tokens = made.tokens[0, :count].tolist()
    return {
        "text": _text(pair, ids, tokens),
        "token_ids": tokens,
        "new_tokens": count,
        "target_steps": steps,
        "tokens_per_step": count / steps,
        "seconds": seconds,
        "tokens_per_second": count / seconds,
        "method": choice.setting.method,
        "setting": to_json(choice.setting),
        "verify": request.rule.name,
        "dtype": str(pair.target.embedding.dtype),
        "quantization": quantized_as(pair.target),
    }


def _text(pair: Pair, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of tokens that follow a prompt."""
    detokenizer = Detokenizer(TokenTexts(pair.tokenizer), prompt)
    return "".join(map(detokenizer.add, tokens)) + detokenizer.flush()


def _narrate(options: Generate, pair: Pair, prompt: str, ids: list[int], request: Request) -> None:
    """Streams the text, after the prompt on a terminal; then says what it cost.

    The clock starts after the first step, before which programs are compiled.
    """
    steps = steps_on_host(request)
    with working("compiling, and reading the prompt"):
        first = next(steps)
    console = Console(highlight=False, soft_wrap=True)
    if console.is_terminal:
        apart = options.chat or options.show_tree
        console.print(Text(prompt, "dim"), end="\n" if apart else "")
    detokenizer = Detokenizer(TokenTexts(pair.tokenizer), ids)
    say_text = _printer(detokenizer, console)
    tokens = passes = 0
    if_interrupted(lambda: f"{tokens} tokens were written; the same command begins anew")
    start = time.perf_counter()
    with _writing(options) as progress:
        for step in itertools.chain([first], steps):
            if options.show_tree:
                print(tree_text(step, pair.tokenizer))
            say_text(step)
            if options.show_tree:
                print()
            tokens += int(step.count[0])
            passes += 1
            progress(tokens, options.max_new_tokens)
            if passes == 1:
                start = time.perf_counter()
    seconds = time.perf_counter() - start
    print_piece(console, detokenizer.flush())
    print(flush=True)
    rate = f", {(tokens - int(first.count[0])) / seconds:.1f} tokens/s" if passes > 1 else ""
    say(f"{tokens} tokens in {passes} steps, {tokens / passes:.2f} tokens per step{rate}.")


@contextlib.contextmanager
def _writing(options: Generate) -> Iterator[Callable[[int, int], None]]:
    """Tokens that are written, as a task where that disturbs no text."""
    if sys.stderr.isatty() or mixed():
        with hidden():
            yield lambda count, of: None
    else:
        with counted("tokens written") as progress:
            yield progress


def _printer(detokenizer: Detokenizer, console: Console) -> Callable[[Step], None]:
    """Prints a step's text: on a terminal coloured by drafter, the target's own tokens plain."""

    def show(step: Step) -> None:
        for index in range(int(step.count[0])):
            piece = detokenizer.add(int(step.tokens[0, index]))
            print_piece(console, piece, style_of(step, index))
        sys.stdout.flush()

    return show


def print_piece(console: Console, piece: str, style: str = "") -> None:
    """Prints a part of a text, in a style where that is a terminal."""
    if console.is_terminal:
        console.print(Text(piece, style), end="")
    else:
        sys.stdout.write(piece)


def style_of(step: Step, index: int) -> str:
    """The colour of the drafter whose node gave token `index`; the last token is the target's."""
    if index + 1 >= int(step.accepted.count[0]):
        return ""
    drafter = int(step.tree.drafter[0, int(step.accepted.path[0, index + 1])])
    return _COLOURS[drafter % len(_COLOURS)]


def tree_text(step: Step, tokenizer: "PreTrainedTokenizerFast") -> str:
    """The tree of a step, drawn; the nodes of the accepted path end in a star."""

    def text(token: int) -> str:
        decoded = tokenizer.decode([token])
        return decoded if isinstance(decoded, str) else "".join(decoded)

    accepted = step.accepted.path[0, 1 : step.accepted.count[0]].tolist()
    return draw_tree(take_row(step.tree, 0), text, accepted=accepted)
