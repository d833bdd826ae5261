"""The tokenizer of a GGUF file, made of its metadata as the model's own is.

Two kinds have names in such files: "gpt2", byte-level BPE, whose pre-tokenizer has a name too, and
"llama", a SentencePiece model of scores. Names and their regular expressions are those of llama.cpp
(`llama-vocab.cpp`); what files leave out, such as normalizers, is as the models' own
`tokenizer.json` have it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from specjax.base.notices import notice
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.gguf.header import Header, header_of, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that are found in a text before it is split."""
_LONGEST = 1024
_MOST_CUTS = 32
"""Gemma's have 6."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_NORMAL_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_NORMAL_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_NORMAL_WORD}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _SLASHED = r"[^\r\n\p{L}\p{N}]?", _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_TEKKEN = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHED}"
)  # fmt: skip
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDING}|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDING}"
    rf"|\p{{N}}{{1,3}}|{_SLASHED}"
)  # fmt: skip
_DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


class _Split(NamedTuple):
    """How a text is split before merging.

    Attributes:
      pattern: of pieces; None for GPT-2's. Of several each splits what those before it left.
      digits: whether digits stand alone first.
      whole: whether a piece that is a token is not merged.
      composed: whether the text is brought into Unicode's form C.
      begins: whether texts begin with a token where the file does not say.
    """

    pattern: str | tuple[str, ...] | None = None
    digits: bool = False
    whole: bool = False
    composed: bool = False
    begins: bool = False


_GPT2 = _Split()
_DIGITS = _Split(digits=True)
_SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "jais", "roberta-bpe"), _GPT2),
    **dict.fromkeys(("mpt", "olmo"), _Split(composed=True)),  # GPT-NeoX's
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3"), _Split(_LLAMA3, whole=True, begins=True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _Split(_LLAMA3)),
    "deepseek-v3": _Split(_DEEPSEEK),
    "qwen2": _Split(_QWEN2, composed=True),
    "deepseek-r1-qwen": _Split(_QWEN2),
    "tekken": _Split(_TEKKEN, whole=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _Split(_GPT4O)),
}
"""Pre-tokenizers by the names that files give them; "default" stands for none."""
_KINDS = ("gpt2", "llama")


def tokenizer_of(file: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of a file, with its chat template.

    Raises:
      CheckpointError: there is none, or one that is not supported.
    """
    header = header_of(file)
    kind = header.get("tokenizer.ggml.model", str)
    if kind not in _KINDS:
        raise CheckpointError(
            f"{file}: its tokenizer is {shown(kind)}; {' and '.join(_KINDS)} are supported."
        )
    tokens = header.get("tokenizer.ggml.tokens", list)
    if tokens is None:
        raise CheckpointError(f"{file} has no tokenizer.ggml.tokens.")
    if (longest := max(map(len, tokens), default=0)) > _LONGEST:
        raise CheckpointError(
            f"{file} has a token of {longest:,} characters; it may have {_LONGEST:,}."
        )
    special = _special(header, tokens)
    if kind == "gpt2":
        made, begins = _byte_level(header, tokens)
    else:
        made, begins = _sentence_piece(header, tokens, special.get("unk_token")), True
    _add_tokens(made, header, tokens)
    begins = header.get("tokenizer.ggml.add_bos_token", bool, begins)
    ends = header.get("tokenizer.ggml.add_eos_token", bool, False)
    _put_around(
        made,
        special.get("bos_token") if begins else None,
        special.get("eos_token") if ends else None,
    )
    from transformers import PreTrainedTokenizerFast

    found = PreTrainedTokenizerFast(
        tokenizer_object=made, clean_up_tokenization_spaces=False, **special
    )
    found.chat_template = header.get("tokenizer.chat_template", str)
    return found


def vocabulary_of(file: Path) -> dict[str, int]:
    """The tokens of a file's tokenizer with their numbers, without making it.

    Raises:
      CheckpointError: there are none, or two are the same.
    """
    header = header_of(file)
    tokens = header.get("tokenizer.ggml.tokens", list)
    if tokens is None:
        raise CheckpointError(f"{file} has no tokenizer.ggml.tokens.")
    own = header.get("tokenizer.ggml.model", str) == "llama"
    return _numbered(_spelled(tokens) if own else tokens, file)


def _spelled(tokens: list[str]) -> list[str]:
    """Pieces with the sign that stands for a space, which some files write as it is."""
    return [_SPACE * len(each) if each and not each.strip(" ") else each for each in tokens]


def _special(header: Header, tokens: list[str]) -> dict[str, str]:
    """The tokens with a part of their own.

    Raises:
      CheckpointError: one is not among the tokens.
    """
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found = {}
    for own, name in names.items():
        number = header.get(key := f"tokenizer.ggml.{own}_token_id", int)
        if number is None or number == 2**32 - 1:
            continue
        if not 0 <= number < len(tokens):
            raise CheckpointError(
                f"{header.file}: {key} is {number}; its tokens are 0 to {len(tokens) - 1}."
            )
        found[name] = tokens[number]
    return found


def _numbered(tokens: list[str], file: Path) -> dict[str, int]:
    """Tokens with their numbers.

    Raises:
      CheckpointError: two are the same.
    """
    found = {token: number for number, token in enumerate(tokens)}
    if len(found) < len(tokens):
        twice = next(token for number, token in enumerate(tokens) if found[token] != number)
        raise CheckpointError(f"{file}: the token {shown(twice)} is there twice.")
    return found


def _byte_level(header: Header, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether texts begin with a token where nothing is said."""
    named = header.get("tokenizer.ggml.pre", str, "default")
    if named not in _SPLITS:
        raise CheckpointError(
            f"{header.file}: its pre-tokenizer is {shown(named)}, which is not supported; "
            f"{', '.join(_SPLITS)} are."
        )
    if named == "default":
        notice(f"{header.file} names no pre-tokenizer; GPT-2's is taken.")
    merges = header.get("tokenizer.ggml.merges", list)
    if merges is None:
        raise CheckpointError(f"{header.file} has no tokenizer.ggml.merges.")
    split, pairs = _SPLITS[named], [tuple(merge.split(" ")) for merge in merges]
    made = _tokenizer(header, tokens, pairs, ignore_merges=split.whole)
    if split.composed:
        made.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    patterns = (split.pattern,) if isinstance(split.pattern, str) else split.pattern or ()
    steps += [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in patterns]
    own = split.pattern is None
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    return made, split.begins


def _tokenizer(header: Header, tokens: list[str], merges: list[Any], **more: Any) -> Tokenizer:
    """A tokenizer that merges pairs of tokens.

    Raises:
      CheckpointError: a pair is of none.
    """
    vocabulary = _numbered(tokens, header.file)
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **more))
    except Exception as error:  # the library's errors have no type of their own
        raise CheckpointError(f"{header.file}: its merges cannot be used: {error}") from error


def _sentence_piece(header: Header, tokens: list[str], unknown: str | None) -> Tokenizer:
    """A SentencePiece model, whose pieces are merged in the order of their scores."""
    spelled = _spelled(tokens)
    scores = header.get("tokenizer.ggml.scores", np.ndarray)
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(
            f"{header.file} has {0 if scores is None else len(scores)} tokenizer.ggml.scores for "
            f"{len(tokens)} tokens."
        )
    by_place = header.architecture.startswith("gemma")  # whose scores do not follow its merges
    order = np.arange(len(tokens)) if by_place else np.argsort(-scores, kind="stable")
    merges = _merges(spelled, order, header.file)
    made = _tokenizer(header, spelled, merges, unk_token=unknown, byte_fallback=True, fuse_unk=True)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    normal: list[Any] = [normalizers.Replace(" ", _SPACE)]
    if header.get("tokenizer.ggml.add_space_prefix", bool, True):
        normal.insert(0, normalizers.Prepend(_SPACE))
        steps.append(decoders.Strip(" ", 1, 0))
    made.normalizer, made.decoder = normalizers.Sequence(normal), decoders.Sequence(steps)
    return made


def _merges(tokens: list[str], order: np.ndarray, file: Path) -> list[tuple[str, str]]:
    """The pairs that make each token, of the first in order first.

    Of one token the pairs with the longest first part come first: the order of all that make
    the same piece does not matter to it.
    """
    numbers = _numbered(tokens, file)
    if (cuts := sum(map(len, tokens))) > _MOST_CUTS * len(tokens):
        raise CheckpointError(
            f"{file}: its {len(tokens):,} tokens have {cuts:,} characters; pieces with scores may "
            f"have {_MOST_CUTS} each, on average."
        )
    found = []
    for at in order.tolist():
        token = tokens[at]
        for cut in range(len(token) - 1, 0, -1):
            first, second = token[:cut], token[cut:]
            if first in numbers and second in numbers:
                found.append((first, second))
    return found


def _add_tokens(made: Tokenizer, header: Header, tokens: list[str]) -> None:
    """Lets control tokens, and those that a user defined, be found whole in a text."""
    types = header.get("tokenizer.ggml.token_type", np.ndarray)
    if types is None:
        return
    for kind, add in ((_CONTROL, made.add_special_tokens), (_USER_DEFINED, made.add_tokens)):
        own = [tokens[at] for at in np.flatnonzero(types == kind) if at < len(tokens)]
        known = [each for each in own if each and made.token_to_id(each) is not None]
        special = kind == _CONTROL
        add(
            [
                AddedToken(
                    each,
                    normalized=False,
                    special=special,
                    rstrip=special and _strips(header, each),
                )
                for each in known
            ]
        )


def _strips(header: Header, token: str) -> bool:
    """Whether white space after a control token is left out: after those of Phi-3's chats."""
    own = header.architecture == "phi3" and header.metadata["tokenizer.ggml.model"] == "llama"
    return own and token not in ("<unk>", "<s>", "<|endoftext|>")


def _put_around(made: Tokenizer, first: str | None, last: str | None) -> None:
    """Lets texts begin and end with tokens."""
    ends = [token for token in (first, last) if token is not None]
    if not ends:
        return
    text = [*([first] if first else []), "$A", *([last] if last else [])]
    other = [each.replace("$A", "$B") + ":1" for each in text]
    made.post_processor = processors.TemplateProcessing(
        single=text,
        pair=text + other,
        special_tokens=[(token, made.token_to_id(token)) for token in dict.fromkeys(ends)],
    )
