"""What a model's `generation_config.json` asks for: defaults of sampling, and end tokens."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.base.sampling import Sampling
from specjax.checkpoints.files import CheckpointError, parsed
from specjax.models.families import end_ids_of

FILE = "generation_config.json"

AUTO, NONE = "auto", "none"
"""What `--generation-config` calls the model's own file, and no file."""

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_LENGTH = "max_new_tokens"
_OFF: Mapping[str, Any] = {
    "do_sample": True,
    "num_beams": 1,
    "num_beam_groups": 1,
    "length_penalty": 1,
    "diversity_penalty": 0,
    "penalty_alpha": 0,
    "typical_p": 1,
    "top_h": None,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "encoder_repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "force_words_ids": None,
    "constraints": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "forced_decoder_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1,
    "watermarking_config": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "stop_strings": None,
}
"""Fields of transformers that change a text and are not honoured, with what leaves them off."""


class Defaults(NamedTuple):
    """What requests take that name none, by the names of requests, and what is to be said of it."""

    values: Mapping[str, float | int]
    notices: tuple[str, ...] = ()


def defaults_for(named: str, folder: Path) -> Defaults:
    """The defaults of sampling that `--generation-config` names.

    Args:
      named: "auto" for the file in `folder`, if there is one, "none" for no defaults, or another
        folder, which must have one.
      folder: the model's.

    Returns:
      Those of `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` and `max_tokens` that
      the file gives. A value that cannot be used is left out, with a notice.

    Raises:
      CheckpointError: the named folder has no such file, or the file holds no object.
    """
    if named == NONE:
        return Defaults({})
    file = (folder if named == AUTO else Path(named)) / FILE
    if not file.is_file():
        if named == AUTO:
            return Defaults({})
        raise CheckpointError(
            f"--generation-config is {named!r}, and there is no {file}; it must be {AUTO}, {NONE}, "
            f"or a folder with a {FILE}."
        )
    return _defaults_in(parsed(file), str(file if named != AUTO else FILE))


def _defaults_in(found: Mapping[str, Any], file: str) -> Defaults:
    values: dict[str, float | int] = {}
    notices = []
    for name in (*_SAMPLING, _LENGTH):
        if found.get(name) is None:
            continue
        try:
            taken = _checked(name, found[name])
        except (ValueError, OverflowError) as error:
            notices.append(f"{file}: {str(error).rstrip('.')}; it is left out.")
        else:
            values["max_tokens" if name == _LENGTH else name] = taken
    others = [name for name, off in _OFF.items() if not _is_off(found.get(name), off)]
    if others:
        what = ", ".join(f"{name} {_short(found[name])}" for name in others)
        notices.append(f"{file}: {what} {'is' if len(others) == 1 else 'are'} not honoured.")
    if values:
        taken = ", ".join(f"{name} {value:g}" for name, value in values.items())
        notices.insert(
            0, f"requests that name none take {taken} of {file}; "
            f"--generation-config {NONE} leaves them out.",
        )  # fmt: skip
    return Defaults(values, tuple(notices))


def _checked(name: str, value: Any) -> float | int:
    """A value as requests may have it.

    Raises:
      ValueError, OverflowError: they may not.
    """
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{name} is {_short(value)}; it must be a finite number")
    if name in ("top_k", _LENGTH):
        if int(value) != value:
            raise ValueError(f"{name} is {value!r}; it must be an integer")
        value = int(value)
        if name == "top_k":
            if abs(value) >= 2**31:  # as many bits as steps have
                raise ValueError(f"{name} is {_short(value)}; it must lie in [0, {2**31 - 1}]")
            return 0 if value == -1 else _within(name, value)  # vLLM's -1 is off
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
        return value
    return _within(name, float(value))


def _within(name: str, value: float | int) -> float | int:
    """The value, if it lies where those of requests do.

    Raises:
      ValueError: it does not.
    """
    given: dict[str, Any] = {name: value}
    Sampling(**given).on_host(1, prefix="")
    return value


def _is_off(value: Any, off: Any) -> bool:
    return value in (None, off, [], {})


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]} ..."


def end_ids_in(folder: Path) -> tuple[int, ...]:
    """The end tokens that a folder's `generation_config.json` names; none if there is no file.

    Raises:
      CheckpointError: the file holds no object, or what it names is no token's number.
    """
    file = folder / FILE
    if not file.is_file():
        return ()
    try:
        return end_ids_of(parsed(file))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def union(vocabulary: int, *ends: Sequence[int]) -> tuple[int, ...]:
    """End tokens of several files, each once; those that a vocabulary has not can never come."""
    every = dict.fromkeys(end for own in ends for end in own)
    return tuple(end for end in every if 0 <= end < vocabulary)
