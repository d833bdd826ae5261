"""Structured output: what a request asks its texts to match, by OpenAI's names and by others'."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from specjax.grammar.sources import GrammarsInUseError, GrammarSource
from specjax.server.errors import ApiError, queue_full
from specjax.server.protocol import GenerationRequest, StructuredOutputs
from specjax.server.reasoning import Thinking, after_thoughts, calls_after_thoughts
from specjax.server.service import Service

if TYPE_CHECKING:
    from specjax.grammar.compiling import Grammar

_ALONE = {
    "guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice",
    "guided_grammar": "grammar", "json_schema": "json_schema", "grammar": "grammar",
    "regex": "regex", "ebnf": "grammar",
}  # fmt: skip
"""Fields of vLLM, llama.cpp and SGLang that say it by themselves, and the kind of each."""


async def grammar_of(
    service: Service,
    body: GenerationRequest,
    calls: GrammarSource | None = None,
    thinking: Thinking | None = None,
) -> "Grammar | None":
    """What the texts of a request must match, compiled; None if it does not say.

    With `calls` of tools that must be made it is those. A model that is `thinking` first may think
    what it likes.

    Raises:
      ApiError: it says so twice, or what it says is refused (400), or there are too many large
        ones (429).
    """
    if calls is not None:
        if thinking is not None:
            calls = calls_after_thoughts(calls, inside=thinking.begun)
        return await _compiled(service, lambda: calls, "tools")
    found = [each for each in _said(body) if each[1] not in (None, "", {}, [])]
    if not found:
        return None
    if len(found) > 1:
        message = f"{found[0][0]} and {found[1][0]} both say what the text must match; give one."
        raise ApiError(400, message, param=found[1][0])
    param, value, kind = found[0]

    def source() -> GrammarSource:
        own = _source(kind, value)
        if thinking is None:
            return own
        return after_thoughts(own, inside=thinking.begun) or own

    return await _compiled(service, source, param)


async def _compiled(service: Service, source: Callable[[], GrammarSource], param: str) -> "Grammar":
    seconds = service.options.text_seconds
    try:
        return await asyncio.wait_for(service.compiled(source), seconds)
    except TimeoutError as error:
        message = f"To compile {param} takes longer than {seconds:g} seconds."
        raise ApiError(400, message, param=param) from error
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from error
    except GrammarsInUseError as error:
        raise queue_full(f"{param}: {error}", param=param) from error


def _source(kind: str, value: Any) -> GrammarSource:
    is_text = isinstance(value, str)
    return GrammarSource(kind, value if is_text else json.dumps(value))  # pyright: ignore[reportArgumentType]


def _said(body: GenerationRequest) -> Iterator[tuple[str, Any, str]]:
    """Each field that says what the text must match, what it says, and of which kind that is."""
    if (own := body.response_format) is not None:
        if own.type == "json_schema":
            if own.json_schema is None or own.json_schema.schema_ is None:
                param = "response_format.json_schema.schema"
                raise ApiError(400, f"{param} is missing.", param=param)
            schema = own.json_schema.schema_
            yield "response_format.json_schema.schema", _any(schema), "json_schema"
        elif own.type == "json_object":
            schema = {"type": "object"} if own.schema_ is None else _any(own.schema_)
            yield "response_format", schema, "json_schema"
    if (asked := body.structured_outputs) is not None:
        yield from _of_vllm(asked)
    for name, kind in _ALONE.items():
        yield name, getattr(body, name), kind


def _of_vllm(asked: StructuredOutputs) -> Iterator[tuple[str, Any, str]]:
    name = "structured_outputs"
    yield f"{name}.json", _any(asked.json_), "json_schema"
    yield f"{name}.json_object", {"type": "object"} if asked.json_object else None, "json_schema"
    for field in ("regex", "choice", "grammar"):
        yield f"{name}.{field}", getattr(asked, field), field
    if asked.choice == []:
        param = f"{name}.choice"
        raise ApiError(400, f"{param}: should have at least 1 item.", param=param)


def _any(schema: Any) -> Any:
    """A schema, of any value where it says nothing."""
    return True if schema == {} else schema
