"""JSON schemas, regular expressions, choices and Lark grammars, compiled for a vocabulary."""

import collections
import dataclasses
import json
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.grammar.matching import TextMatcher
from specjax.grammar.sources import (
    INSTALL,
    KINDS,
    WHITE_SPACE,
    GrammarsInUseError,
    GrammarSource,
    choice_in_lark,
)

if TYPE_CHECKING:
    import llguidance
    from transformers import PreTrainedTokenizerFast

LARGEST = 2**18
"""Bytes of a grammar's text."""
_SIMPLE = {"true": "{}", "false": '{"not": {}}'}
"""Schemas that are no objects, as ones."""
_KEPT, _KEPT_CHARACTERS = 256, 2**20
"""Compiled grammars, and characters of their sources: compiled, an expression takes up to 250 bytes
for each.
"""
_LARGE = 2**12
"""Characters from which on a source counts for what may be in use."""


@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
    """What texts must match, compiled for the vocabulary of a model."""

    source: GrammarSource
    _first: "llguidance.LLMatcher"
    _end_ids: frozenset[int]
    _vocabulary: int

    def matcher(self) -> TextMatcher:
        """A matcher at the beginning of a text."""
        return TextMatcher(self._first, self._end_ids, self._vocabulary)


class GrammarCompiler:
    """Compiles grammars for a model; equal ones once, as long as they are in use or among the last
    256, of which large ones are fewer.

    Args:
      tokenizer: the model's.
      vocab_size: tokens of the model, of which there may be more than the tokenizer knows.
      eos_ids: its end tokens, one of which follows where a text may end.
      max_characters_in_use: of the sources of large grammars (from 4,096 characters on) that may
        be held at once; None is no limit.

    Raises:
      ValueError: llguidance is not installed, the tokenizer is not a fast one, or the model has no
        end token.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        vocab_size: int,
        eos_ids: Sequence[int],
        max_characters_in_use: int | None = None,
    ) -> None:
        try:
            import llguidance
            from llguidance import grammar_from
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ValueError(INSTALL) from error
        if not eos_ids:
            raise ValueError("the model has no end token, which ends a text under a grammar.")
        self._end_ids, self._vocabulary = frozenset(eos_ids), vocab_size
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=[*eos_ids])
        self._make, self._from = llguidance.LLMatcher, grammar_from
        # Others' texts wait while a mask is looked for: by itself it may take a tenth of a second.
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=50_000, max_grammar_size=100_000, step_max_items=8_000,
            step_lexer_fuel=100_000, verbose_errors=False,
        )  # fmt: skip
        self._last: collections.OrderedDict[GrammarSource, Grammar] = collections.OrderedDict()
        self._in_use = weakref.WeakValueDictionary[GrammarSource, Grammar]()
        self._most_in_use = max_characters_in_use
        self._lock = threading.Lock()

    def json_schema(self, schema: Mapping[str, Any] | str | bool) -> Grammar:
        """JSON that a schema describes. Raises: see `compile`."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return self.compile(GrammarSource("json_schema", text))

    def json_object(self) -> Grammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> Grammar:
        """A regular expression that the whole text matches. Raises: see `compile`."""
        return self.compile(GrammarSource("regex", pattern))

    def choice(self, texts: Sequence[str]) -> Grammar:
        """One of some texts. Raises: see `compile`."""
        return self.compile(GrammarSource("choice", json.dumps([*texts])))

    def grammar(self, text: str) -> Grammar:
        """A context-free grammar in llguidance's variant of Lark, or in GBNF. Raises: see
        `compile`.
        """
        return self.compile(GrammarSource("grammar", text))

    def compile(self, source: GrammarSource) -> Grammar:
        """Any of them.

        Raises:
          ValueError: the text is not of its kind, too large or too complex, or nothing matches.
          GrammarsInUseError: it is large, and so many such are in use that it may not be.
        """
        with self._lock:
            found = self._in_use.get(source)
            if found is None:
                self._check_room(source)
            else:
                self._keep(source, found)
                return found
        made = self._compiled(source)
        with self._lock:
            self._in_use[source] = made
            self._keep(source, made)
        return made

    def _check_room(self, source: GrammarSource) -> None:
        """Refuses one that is too large beside those in use; what is only kept makes room."""
        size, most = len(source.text), self._most_in_use
        if most is None or size < _LARGE:
            return
        for kept in [each for each in self._last if len(each.text) >= _LARGE]:
            if self._large_in_use() + size <= most:
                return
            del self._last[kept]
        used = self._large_in_use()
        if used and used + size > most:
            raise GrammarsInUseError(
                f"large grammars of {used} characters are in use; with {size} more they exceed "
                f"the {most} that may be."
            )

    def _large_in_use(self) -> int:
        return _characters(each for each in [*self._in_use] if len(each.text) >= _LARGE)

    def _keep(self, source: GrammarSource, grammar: Grammar) -> None:
        """Keeps one as the last, in place of those before that there is no room for."""
        self._last[source] = grammar
        self._last.move_to_end(source)
        while len(self._last) > _KEPT or _characters(self._last) > _KEPT_CHARACTERS:
            self._last.popitem(last=False)

    def _compiled(self, source: GrammarSource) -> Grammar:
        name = source.kind.replace("_", " ").replace("json", "JSON")
        size = len(source.text.encode("utf-8", "surrogatepass"))
        if size > LARGEST:
            raise ValueError(f"the {name} has {size} bytes; it may have {LARGEST}.")
        try:
            text = self._text_of(source)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the {name} is refused: {_line(error)}") from error
        made = self._make(self._tokenizer, text, log_level=0, limits=self._limits)
        if made.is_error():
            raise ValueError(f"the {name} is refused: {_line(made.get_error())}")
        grammar = Grammar(source, made, self._end_ids, self._vocabulary)
        first = grammar.matcher()
        words = first.words()
        if first.error():
            raise ValueError(f"the {name} is refused: {first.error()}")
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        token = next((n for n in np.flatnonzero(bits).tolist() if not first.is_end(n)), None)
        if token is not None:
            made = made.deep_copy()
            made.consume_token(token)
            made.rollback(1)  # which rules with max_tokens or stop cannot be
            if made.is_error():
                raise ValueError(
                    f"the {name} is refused: its texts cannot be drafted, as rules with max_tokens "
                    "or stop cannot."
                )
        return grammar

    def _text_of(self, source: GrammarSource) -> str:
        """The grammar as llguidance has it."""
        match source.kind:
            case "json_schema":
                schema = _SIMPLE.get(source.text.strip(), source.text)
                options: Any = {"whitespace_pattern": WHITE_SPACE}
                return self._make.grammar_from_json_schema(schema, overrides=options)
            case "regex":
                return self._make.grammar_from_regex(source.text)
            case "grammar":
                return self._from("grammar", source.text)
            case "choice":
                texts = json.loads(source.text)
                if not isinstance(texts, list) or not texts:
                    raise ValueError("it must be a list of texts, one at least.")
                if any(not isinstance(each, str) or not each for each in texts):
                    raise ValueError("its texts must be texts that are not empty.")
                return self._make.grammar_from_lark(f"start: CHOICE\n{choice_in_lark(texts)}")
        raise ValueError(f"there is no kind {source.kind!r}; there are {', '.join(KINDS)}.")


def _characters(sources: Iterable[GrammarSource]) -> int:
    return sum(len(source.text) for source in sources)


def _line(error: object) -> str:
    """A message as one line that ends in a stop."""
    text = " ".join(str(error).split())[:300].rstrip(".")
    if "coerce_one_of" in text:
        text = "oneOf is not supported where its options may overlap; use anyOf"
    return f"{text}."
