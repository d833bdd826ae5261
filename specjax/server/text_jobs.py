"""What worker processes do: bodies, chat templates and texts become values and token ids.

Arguments and results are what `marshal` takes: values of JSON, and bytes.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specjax.checkpoints.detokenizer import TokenTexts
from specjax.server.parsing import Most, RefusedError, check_amount, parsed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_QUOTED = 300
_OK, _REFUSED, _FAILED = range(3)
_MOST_BYTES = 64 << 20
"""Of a result."""


class TextJobs:
    """Jobs that need a tokenizer, each a method; `perform` runs one by its name.

    Args:
      tokenizer: the model's.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer: Any = tokenizer
        self._texts = TokenTexts(tokenizer)

    def perform(self, job: str, *arguments: Any) -> tuple[Any, ...]:
        """What `result_of` takes: the result of a job, or why what a client sent is refused."""
        try:
            return _OK, getattr(self, job)(*arguments)
        except RefusedError as refused:
            return _REFUSED, str(refused), refused.param, refused.code
        except MemoryError:
            return _REFUSED, "The request needs more memory than it may take.", None, None
        except Exception as error:
            return _FAILED, f"{job} failed: {type(error).__name__}: {_quoted(error)}"

    def parse(self, body: bytes, most: Sequence[int]) -> Any:
        """The value of a body of at most so much."""
        value = parsed(body)
        check_amount(value, Most(*most))
        return value

    def render(
        self,
        template: Any,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        most_bytes: int | None,
    ) -> str:
        """The prompt that a chat template makes."""
        self._tokenizer.chat_template = template
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, **variables)
        except MemoryError:
            raise
        except Exception as error:  # what a template raises has no type of its own
            message = f"The chat template refuses these messages: {_quoted(error)}."
            raise RefusedError(message, "messages") from error
        check_length(text, most_bytes, "messages")
        return text

    def chat(self, *arguments: Any) -> list[int]:
        """The tokens of a chat.

        The arguments are those of `render`, whether special tokens are put around what it makes,
        and how many tokens may come.
        """
        *of_render, special, most_ids = arguments
        return self.encode(self.render(*of_render), special, most_ids, "messages")

    def count(self, *arguments: Any) -> int:
        """How many tokens a chat has; the arguments are those of `chat`."""
        return len(self.chat(*arguments))

    def encode(self, text: str, special: bool, most_ids: int, param: str) -> list[int]:
        """The tokens of a text, with the tokenizer's special tokens around it if asked for."""
        try:
            ids = list(self._tokenizer(text, add_special_tokens=special).input_ids)
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # panics of the library's Rust are no `Exception`
            message = f"The tokenizer fails at {param}: {_quoted(error)}."
            raise RefusedError(message, param) from error
        if len(ids) > most_ids:
            raise too_long(f"{len(ids)} tokens", f"{most_ids} tokens", param)
        return ids

    def named(self, ids: list[int], names: bool, shared: Mapping[str, Any]) -> bytes:
        """The body of `/tokenize`'s response."""
        content = {
            "count": len(ids),
            **shared,
            "tokens": ids,
            "token_strs": self._texts.names_of(ids) if names else None,
        }
        return _json(content)

    def tokenize_chat(self, names: bool, shared: Mapping[str, Any], *arguments: Any) -> bytes:
        """The response of `/tokenize` to a chat; the further arguments are those of `chat`."""
        return self.named(self.chat(*arguments), names, shared)

    def tokenize_text(self, names: bool, shared: Mapping[str, Any], *arguments: Any) -> bytes:
        """The response of `/tokenize` to a text; the further arguments are those of `encode`."""
        return self.named(self.encode(*arguments), names, shared)

    def decode(self, ids: list[int]) -> bytes:
        """The body of `/detokenize`'s response."""
        try:
            text = self._texts.decode(ids, special=True)
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            message = f"The tokenizer fails at tokens: {_quoted(error)}."
            raise RefusedError(message, "tokens") from error
        return _json({"prompt": text})


def result_of(reply: Sequence[Any]) -> Any:
    """The result of a job.

    Raises:
      RefusedError: it refuses what a client sent.
      RuntimeError: it failed.
    """
    kind, *values = reply
    if kind == _REFUSED:
        raise RefusedError(*values)
    if kind == _FAILED:
        raise RuntimeError(*values)
    return values[0]


def check_length(text: str, most_bytes: int | None, param: str) -> None:
    """Refuses a text of which so many bytes cannot be tokens that fit; None refuses none.

    Raises:
      RefusedError: 400.
    """
    if most_bytes is not None and (size := len(text.encode())) > most_bytes:
        raise too_long(f"{size:,} bytes", f"{most_bytes:,} bytes", param)


def too_long(has: str, fits: str, param: str) -> RefusedError:
    """That a prompt cannot fit into the model's context."""
    message = f"This model's maximum context length is exceeded: {param} has {has}, of which at"
    return RefusedError(f"{message} most {fits} can fit.", param, "context_length_exceeded")


def _json(content: Mapping[str, Any]) -> bytes:
    """A response's body.

    Raises:
      RefusedError: it is too large.
    """
    made = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    if len(made) > _MOST_BYTES:
        raise RefusedError(f"The response has {len(made):,} bytes; it may have {_MOST_BYTES:,}.")
    return made


def _quoted(error: BaseException) -> str:
    return str(error)[:_QUOTED].rstrip(".")
