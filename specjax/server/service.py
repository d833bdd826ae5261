"""What the routes share: the engine, the tokenizer, the limits, and whether requests are taken."""

import asyncio
import hmac
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import HTTPConnection

from specjax.checkpoints.detokenizer import TokenTexts
from specjax.server.errors import ApiError, unavailable
from specjax.server.log import IgnoredFields
from specjax.server.metrics import Metrics
from specjax.server.options import ServerOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from specjax.engine.engine import Engine

_T = TypeVar("_T")
_LONG = 4096
"""Characters or tokens from which on the event loop would notice: about a millisecond's work."""


class Service:
    """What answers requests.

    Args:
      engine: started, or starting in another thread.
      tokenizer: the model's.
      options: limits and names.

    Raises:
      ValueError: a key is empty.
    """

    def __init__(
        self, engine: "Engine", tokenizer: "PreTrainedTokenizerFast", options: ServerOptions
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.options = options
        self.texts = TokenTexts(tokenizer)
        self.metrics = Metrics(engine, options.served_model_name)
        self.ignored = IgnoredFields()
        self.draining = False
        self._worker = ThreadPoolExecutor(1, "specjax-tokenizer")
        self._keys = [key.encode() for key in options.api_keys]
        if not all(self._keys):
            raise ValueError("an API key is empty.")

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
            raise unavailable("The server is shutting down.", "server_shutting_down")
        if state == "failed":
            raise unavailable(f"The engine has failed: {self.engine.failure}", "engine_failed")

    def check_key(self, request: HTTPConnection) -> None:
        """Refuses a request without one of the keys, if there are any.

        Raises:
          ApiError: 401.
        """
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.encode("latin-1"), key) for key in self._keys]
        if self._keys and not (any(matches) and scheme.lower() == "bearer"):
            raise ApiError(
                401,
                "The API key is missing or wrong; send it as Authorization: Bearer KEY.",
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
        """The result of `work`, in a thread of its own if its `length` is large."""
        if length < _LONG:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of a text, with the tokenizer's special tokens around it if asked for."""
        return await self.run_apart(
            len(text), lambda: list(self.tokenizer(text, add_special_tokens=special).input_ids)
        )

    def close(self) -> None:
        """Ends the tokenizer's thread."""
        self._worker.shutdown(wait=False, cancel_futures=True)


def service_of(request: HTTPConnection) -> Service:
    """The service of the application that a request came to."""
    return request.app.state.service
