"""What the routes share: the engine, the tokenizer, the limits, and whether requests are taken."""

import asyncio
import hmac
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import HTTPConnection

from specjax.checkpoints.detokenizer import TokenTexts
from specjax.grammar.sources import GrammarSource
from specjax.server.errors import ApiError, unavailable
from specjax.server.log import IgnoredFields
from specjax.server.metrics import Metrics
from specjax.server.options import ServerOptions
from specjax.server.parsing import Most, RefusedError
from specjax.server.stored import Stored
from specjax.server.text_jobs import check_length
from specjax.server.token_lengths import most_bytes_of_tokens
from specjax.server.workers import WorkerLostError, Workers, WorkersClosedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from specjax.engine.engine import Engine
    from specjax.grammar.compiling import Grammar, GrammarCompiler

_T = TypeVar("_T")
_LONG = 256
"""Tokens whose texts take about a millisecond, from which on the event loop would notice."""
_LONG_TEXT = 1 << 16
"""Characters of a text, or of a chat, that takes long to tokenize."""
_MOST_IDS = 1 << 18
"""Of `/detokenize`, or the model's context if that is longer."""
_MOST_VALUES = 1 << 14
"""Of a body, token ids aside."""
_GRAMMARS_IN_USE = 1 << 22
"""Characters of large grammars that requests may wait or run with, which take about a gibibyte."""


class Service:
    """What answers requests.

    Args:
      engine: started, or starting in another thread.
      tokenizer: the model's.
      options: limits and names.

    Raises:
      ValueError: a key is empty, or the tokenizer cannot be sent to another process.
    """

    def __init__(
        self, engine: "Engine", tokenizer: "PreTrainedTokenizerFast", options: ServerOptions
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.options = options
        self.texts = TokenTexts(tokenizer)
        self._texts_with: dict[frozenset[str], TokenTexts] = {}
        self.metrics = Metrics(engine, options.served_model_name)
        self.ignored = IgnoredFields()
        self.stored = Stored()
        self.draining = False
        self._keys = [key.encode() for key in options.api_keys]
        if not all(self._keys):
            raise ValueError("an API key is empty.")
        self._bytes_of_tokens = most_bytes_of_tokens(tokenizer)
        self._thread = ThreadPoolExecutor(1, "specjax-texts")
        self._compilers = ThreadPoolExecutor(2, "specjax-grammars")
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()
        self._workers = Workers(
            tokenizer,
            count=options.text_workers,
            seconds=options.text_seconds,
            memory_bytes=options.text_memory_bytes,
        )

    def state(self) -> str:
        """What the server does: "starting", "ready", "draining" or "failed"."""
        if self.engine.failure is not None:
            return "failed"
        if self.draining:
            return "draining"
        return "ready" if self.engine.ready else "starting"

    def check_ready(self) -> None:
        """Refuses a request that the engine could not take.

        Raises:
          ApiError: 503.
        """
        state = self.state()
        if state == "starting":
            raise unavailable("The engine is still compiling its programs.", "engine_starting")
        if state == "draining":
            raise _shutting_down()
        if state == "failed":
            raise unavailable(f"The engine has failed: {self.engine.failure}", "engine_failed")

    def check_key(self, request: HTTPConnection) -> None:
        """Refuses a request without one of the keys, if there are any.

        Raises:
          ApiError: 401.
        """
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = [bearer] if scheme.lower() == "bearer" else []
        given += request.headers.getlist("x-api-key")  # as Anthropic's clients send it
        matches = [
            hmac.compare_digest(each.encode("latin-1"), key) for each in given for key in self._keys
        ]
        if self._keys and not any(matches):
            raise ApiError(
                401,
                "The API key is missing or wrong; send it as Authorization: Bearer KEY, or as "
                "X-Api-Key: KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def check_model(self, name: str | None) -> None:
        """Refuses a model that is not served.

        Raises:
          ApiError: 404.
        """
        served = self.options.served_model_name
        if name is not None and name != served:
            message = f"There is no model {name[:80]!r}; this server has {served!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    @property
    def special_ids(self) -> dict[str, int]:
        """Special tokens by their names."""
        return {each.name: each.id for each in self.texts.special}

    def texts_with(self, names: Sequence[str]) -> TokenTexts:
        """Texts of tokens, in which special ones of these names are shown."""
        shown = frozenset(names) & self.special_ids.keys()
        if not shown:
            return self.texts
        if shown not in self._texts_with:
            self._texts_with[shown] = TokenTexts(self.tokenizer, shown)
        return self._texts_with[shown]

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Refuses tokens that the model does not have.

        Raises:
          ApiError: 400.
        """
        if ids and (largest := max(ids)) >= self.engine.vocab_size:
            message = (
                f"{param} has the token id {largest}; those of this model are below "
                f"{self.engine.vocab_size}."
            )
            raise ApiError(400, message, param=param)

    async def run_apart(self, length: int, work: Callable[[], _T]) -> _T:
        """The result of `work`, in a thread of its own if its `length` is large.

        It is the server's own Python, which lets the event loop run meanwhile.
        """
        if length < _LONG:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def compiled(self, source: Callable[[], GrammarSource]) -> "Grammar":
        """A grammar, compiled in a thread of its own.

        Raises:
          ValueError: it is refused, or there can be none.
          GrammarsInUseError: there are too many large ones.
        """
        work = partial(self._compile, source)
        return await asyncio.get_running_loop().run_in_executor(self._compilers, work)

    def _compile(self, source: Callable[[], GrammarSource]) -> "Grammar":
        from specjax.grammar.compiling import GrammarCompiler  # which loads jax

        with self._compiler_lock:  # the first one takes half a second
            if self._compiler is None:
                self._compiler = GrammarCompiler(
                    self.tokenizer, self.engine.vocab_size, self.engine.eos_ids,
                    max_characters_in_use=_GRAMMARS_IN_USE,
                )  # fmt: skip
        return self._compiler.compile(source())

    def most(self) -> Most:
        """How much a body may have."""
        context = self.engine.max_model_len
        return Most(self.options.max_messages, context, max(context, _MOST_IDS), _MOST_VALUES)

    async def parsed(self, body: bytes) -> Any:
        """The value of a large body, as `parsed` and `check_amount` give it.

        Raises:
          ApiError: they refuse it (400).
        """
        return await self._run("parse", body, tuple(self.most()), param=None)

    async def encode(self, text: str, *, special: bool = True, param: str = "prompt") -> list[int]:
        """The token ids of a text, with the tokenizer's special tokens around it if asked for.

        Raises:
          ApiError: they cannot fit into the context, or the tokenizer fails or takes too
            much (400).
        """
        most = self.engine.max_model_len
        self._check_length(text, param)
        arguments = text, special, most, param
        return await self._run("encode", *arguments, param=param, long=len(text) > _LONG_TEXT)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        special: bool = False,
    ) -> list[int]:
        """The token ids of a chat by the model's chat template.

        Args:
          messages: values of JSON.
          variables: of the template.
          special: whether the tokenizer's special tokens are put around what the template made.

        Raises:
          ApiError: the template refuses the messages, the tokens cannot fit into the context, or
            either takes too much (400).
        """
        chat = self._chat(messages, variables, special, self.engine.max_model_len)
        return await self._run("chat", *chat, param="messages", long=_is_long(messages))

    async def tokenized(self, text: str, special: bool, names: bool) -> bytes:
        """The body of `/tokenize`'s response to a text.

        Raises:
          ApiError: the tokenizer fails or takes too much (400).
        """
        arguments = names, self._shared(), text, special, self.options.max_body_bytes, "prompt"
        long = len(text) > _LONG_TEXT
        return await self._run("tokenize_text", *arguments, param="prompt", long=long)

    async def tokenized_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        special: bool,
        names: bool,
    ) -> bytes:
        """The body of `/tokenize`'s response to a chat.

        Raises:
          ApiError: the template refuses the messages, or it takes too much (400).
        """
        chat = self._chat(messages, variables, special, self.options.max_body_bytes)
        arguments, long = (names, self._shared(), *chat), _is_long(messages)
        return await self._run("tokenize_chat", *arguments, param="messages", long=long)

    async def count_of_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> int:
        """How many tokens a chat has by the model's chat template, which may be beyond the context.

        Raises:
          ApiError: the template refuses the messages, or it takes too much (400).
        """
        chat = self._chat(messages, variables, False, self.options.max_body_bytes)
        return await self._run("count", *chat, param="messages", long=_is_long(messages))

    async def detokenized(self, ids: list[int]) -> bytes:
        """The body of `/detokenize`'s response.

        Raises:
          ApiError: the tokenizer fails or takes too much (400).
        """
        return await self._run("decode", ids, param="tokens")

    def _shared(self) -> dict[str, Any]:
        return {"max_model_len": self.engine.max_model_len}

    def _chat(self, messages: Any, variables: Any, special: bool, most_ids: int) -> tuple[Any, ...]:
        """The arguments of the job `chat`."""
        template, most_bytes = self.tokenizer.chat_template, self._most_bytes(most_ids)
        return template, list(messages), dict(variables), most_bytes, special, most_ids

    def _most_bytes(self, ids: int) -> int | None:
        return None if self._bytes_of_tokens is None else self._bytes_of_tokens * ids

    def _check_length(self, text: str, param: str) -> None:
        """Refuses a text that cannot fit into the context before it is tokenized."""
        try:
            check_length(text, self._most_bytes(self.engine.max_model_len), param)
        except RefusedError as refused:
            raise refusal(refused) from refused

    async def _run(self, job: str, *arguments: Any, param: str | None, long: bool = False) -> Any:
        what = "the body" if param is None else param
        try:
            return await self._workers.run(job, *arguments, long=long)
        except RefusedError as refused:
            raise refusal(refused) from refused
        except TimeoutError as error:
            seconds = f"{self.options.text_seconds:g} seconds"
            message = f"To read {what} takes longer than {seconds}, which is all a request has."
            raise ApiError(400, message, param=param) from error
        except WorkerLostError as error:
            message = f"To read {what} takes more memory than a request may have."
            raise ApiError(400, message, param=param) from error
        except WorkersClosedError as error:
            raise _shutting_down() from error

    def end_workers(self) -> None:
        """Ends the workers; requests that wait for one are refused."""
        self._workers.close()

    def close(self) -> None:
        """Ends the thread and the workers."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._workers.close()


def _shutting_down() -> ApiError:
    return unavailable("The server is shutting down.", "server_shutting_down")


def refusal(refused: RefusedError) -> ApiError:
    """The 400 to what a client sent."""
    return ApiError(400, str(refused), param=refused.param, code=refused.code)


def _is_long(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a chat's own texts take long to tokenize."""
    texts = (message.get("content") for message in messages)
    return sum(len(text) for text in texts if isinstance(text, str)) > _LONG_TEXT


def service_of(request: HTTPConnection) -> Service:
    """The service of the application that a request came to."""
    return request.app.state.service
