"""How long an engine's texts may be and how many pages its caches have, by the memory there is."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from pallas_kernels.dispatch import named
from pallas_kernels.platform import platform
from specjax.decoding.request import check_memory, memory_plan
from specjax.draft.drafter import Drafter
from specjax.engine.pages import Paging
from specjax.models import memory
from specjax.models.transformer import Model
from specjax.verify.rules import Rule

_PAGE_SIZES = {"cpu": 64, "gpu": 128, "tpu": 512}
"""Slots of a page where none are named. On a TPU a page is a tile of its kernel."""
_LEAST_PAGE = 64

_SLOT_MULTIPLE = 128
_LEAST_CONTEXT, _SHARE_FOR_TEXTS = 2048, 0.8
"""Of the context that is taken where none is named: tokens at least, unless the model has fewer;
and the share of free memory that texts may have then. Programs and compiling them need the rest."""
_TEXTS_A_ROW = 4
"""Texts that are kept for each that runs, where they are pages and little else."""
_BYTES_A_TEXT = 9
"""Bytes of such a text for each token of the vocabulary (bias, counts) or of its own (ids)."""
_DRAFT_PAGES = 2
"""Pages of drafts there are for each of the target's, which rows share."""


class Sizes(NamedTuple):
    """Tokens that a request may have, slots of a row, how many texts there are of those that run
    and have ended, and the pages; None where rows have none.
    """

    max_model_len: int
    slots: int
    texts: int
    paging: Paging | None


def sizes_of(
    target: Model,
    drafter: Drafter,
    rule: Rule,
    rows: int,
    chunk: int,
    *,
    max_model_len: int | None = None,
    page_size: int | None = None,
    kv_cache_tokens: int | None = None,
    shards: int = 1,
) -> Sizes:
    """The sizes of an engine's caches (see `Engine`), which reads `chunk` tokens at once at most.

    Raises:
      ValueError: they cannot be as asked, or there is no memory for them.
    """
    most = target.config.max_positions
    _check(most, max_model_len, page_size, kv_cache_tokens, shards)
    size = default_page_size(shards) if page_size is None else page_size

    def plan(slots: int, tokens: int) -> memory.Plan:
        held = _held(paging_of(drafter, rows, slots, tokens, size))
        return memory_plan(target, drafter, rule, rows, chunk, slots, paged=held)

    spare = plan(_SLOT_MULTIPLE, _SLOT_MULTIPLE).available

    def fits(needed: memory.Plan, slots: int) -> bool:
        if spare is None:
            return True
        ended = texts_of(drafter, rows, size) - rows
        kept = ended * (slots + target.config.vocab_size) * _BYTES_A_TEXT
        return needed.beside_weights + kept <= _SHARE_FOR_TEXTS * spare

    slots_for = partial(slots_of, drafter=drafter, chunk=chunk, page_size=size)
    if kv_cache_tokens is not None:
        most = min(most, kv_cache_tokens // size * size - drafter.window)
        if most < (text := max_model_len or 2):
            raise ValueError(
                f"kv_cache_tokens is {kv_cache_tokens}, which in pages of {size} are too few for a "
                f"text of {text} and the {drafter.window} of a step."
            )
    if max_model_len is None:

        def alone(tokens: int) -> bool:
            slots = slots_for(tokens)
            return fits(plan(slots, kv_cache_tokens or slots), slots)

        max_model_len = _most_that_fits(min(_LEAST_CONTEXT, most), most, alone)
    slots, paging = slots_for(max_model_len), None
    if size:
        tokens = kv_cache_tokens or _most_that_fits(
            slots, rows * slots, lambda tokens: fits(plan(slots, tokens), slots)
        )
        paging = paging_of(drafter, rows, slots, tokens, size)
    try:
        check_memory(target, drafter, rule, rows, chunk, slots, paged=_held(paging))
    except ValueError as error:
        raise ValueError(f"{error} Use fewer rows or a smaller max_model_len.") from None
    return Sizes(max_model_len, slots, texts_of(drafter, rows, size), paging)


def default_page_size(shards: int) -> int:
    """Slots of a page where none are named; 0 where rows have no pages, as over several devices,
    and where attention is XLA's, which would copy all that rows may hold.
    """
    return 0 if shards > 1 or named() in ("xla", "reference") else _PAGE_SIZES[platform()]


def texts_of(drafter: Drafter, rows: int, page_size: int) -> int:
    """How many texts an engine of so many rows keeps; of a pool of drafts each has whole caches."""
    pools = any(draft.pool for draft in memory.loads_in(drafter))
    return rows * (_TEXTS_A_ROW if page_size and not pools else 1)


def slots_of(tokens: int, drafter: Drafter, chunk: int, page_size: int) -> int:
    """Cache slots of a row that holds so many tokens, which are read `chunk` at a time."""
    multiple = max(_SLOT_MULTIPLE, page_size)
    count = -(-(tokens + max(chunk, drafter.window)) // multiple)
    return multiple * (max(count, 2) if page_size else count)  # with one page it would be a row


def paging_of(
    drafter: Drafter, rows: int, slots: int, tokens: int, page_size: int
) -> Paging | None:
    """The pages of caches for so many tokens, of an engine of so many rows; None where they have
    none.
    """
    if not page_size:
        return None
    whole = texts_of(drafter, rows, page_size) * slots // page_size
    wanted, drafts = tokens // page_size, 0
    if any(not draft.pool for draft in memory.loads_in(drafter)):
        drafts = 1 + min(whole, _DRAFT_PAGES * wanted)
    return Paging(page_size, 1 + min(whole, wanted), drafts)


def _held(paging: Paging | None) -> tuple[int, int] | None:
    """Tokens that the target's pages have room for, and a draft's."""
    if paging is None:
        return None
    return paging.size * paging.target_pages, paging.size * paging.draft_pages


def _check(
    most: int, max_model_len: int | None, page_size: int | None, tokens: int | None, shards: int
) -> None:
    if max_model_len is not None and not 2 <= max_model_len <= most:
        raise ValueError(
            f"max_model_len is {max_model_len}; it must lie in [2, {most}], the model's context."
        )
    if page_size and (page_size < _LEAST_PAGE or page_size & (page_size - 1)):
        raise ValueError(
            f"page_size is {page_size}; it must be a power of two, {_LEAST_PAGE} at least, or 0 "
            "for rows without pages."
        )
    if page_size and shards > 1:
        raise ValueError(
            f"page_size is {page_size}, and rows are spread over {shards} devices, where they have "
            "no pages."
        )
    if tokens is not None and not (default_page_size(shards) if page_size is None else page_size):
        raise ValueError(
            f"kv_cache_tokens is {tokens}, and rows have no pages here; give a page_size, too."
        )


def _most_that_fits(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number, of `least` and `most` or a multiple between them, that fits.

    Below the least none is taken, whether it fits or not.
    """
    if fits(most):
        return most
    low, high = least // _SLOT_MULTIPLE, most // _SLOT_MULTIPLE
    while low < high:
        half = (low + high + 1) // 2
        low, high = (half, high) if fits(half * _SLOT_MULTIPLE) else (low, half - 1)
    return max(least, low * _SLOT_MULTIPLE)
