"""Which tokens end a text: those that any of a folder's files names."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specjax.base.notices import notice
from specjax.base.pytree import replace
from specjax.checkpoints import generation_config
from specjax.checkpoints.files import Files, config_of, described_by
from specjax.models import families
from specjax.models.transformer import Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def with_end_tokens(model: Model, tokenizer: "PreTrainedTokenizerFast", files: Files) -> Model:
    """The model with its tokenizer's end token among those that end a text.

    Where `config.json`, `generation_config.json` and the tokenizer disagree, a notice says what
    each has.
    """
    config = model.config
    files_own = {
        described_by(files.path): families.read_config(config_of(files.path)).eos_ids,
        generation_config.FILE: generation_config.end_ids_in(files.path),
    }
    tokenizers_own = _of_tokenizer(tokenizer)
    own = {**files_own, "the tokenizer": tokenizers_own}
    ends = generation_config.union(config.vocab_size, config.eos_ids, tokenizers_own)
    differing = len({frozenset(ids) for ids in files_own.values() if ids}) > 1
    if differing or (config.eos_ids and set(tokenizers_own) - set(config.eos_ids)):
        said = "; ".join(f"{_listed(ids)} in {where}" for where, ids in own.items() if ids)
        notice(f"end tokens are {said}. Each of {_listed(ends)} ends a text.")
    beyond = [end for ids in own.values() for end in ids if end not in ends]
    if beyond:
        notice(
            f"the end token {beyond[0]} can never come: the vocabulary has {config.vocab_size:,}."
        )
    if ends == config.eos_ids:
        return model
    return replace(model, config=dataclasses.replace(config, eos_ids=ends))


def _listed(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids))


def _of_tokenizer(tokenizer: "PreTrainedTokenizerFast") -> tuple[int, ...]:
    """Its end token; a name that its vocabulary lacks would be the unknown token's number."""
    number = tokenizer.get_vocab().get(str(tokenizer.eos_token))
    return () if tokenizer.eos_token is None or number is None else (number,)
