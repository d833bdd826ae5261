"""A talk with a model: what was said, as its chat template renders it, and the replies to it."""

import dataclasses
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

import jax

from specjax.base.sampling import Sampling
from specjax.checkpoints.detokenizer import Detokenizer, TokenTexts
from specjax.checkpoints.tokenizers import Message, ids_of_talk
from specjax.decoding.conversation import Conversation
from specjax.draft import Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_NOTICED_SECONDS = 0.1
"""How soon Ctrl-C is noticed while programs are compiled."""


@dataclasses.dataclass
class Reply:
    """A reply, and what it cost.

    Attributes:
      text: without special tokens.
      token_ids: all of its tokens.
      finish_reason: "stop" (an end token, which is the last), "length" or "interrupted".
      read_tokens: of the prompt that were read for it.
      cached_tokens: of the prompt that were held from the turns before.
      dropped_messages: the oldest ones, which were left out as the context is full.
      steps: passes of the target after the prompt.
      seconds_to_first_token: since the message came.
      seconds: from then to the last token.
      last: the last step.
    """

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str = "interrupted"
    read_tokens: int = 0
    cached_tokens: int = 0
    dropped_messages: int = 0
    steps: int = 0
    seconds_to_first_token: float | None = None
    seconds: float = 0.0
    last: Step | None = None

    @property
    def tokens_per_step(self) -> float:
        """Of the target's passes."""
        return len(self.token_ids) / max(self.steps, 1)

    @property
    def tokens_per_second(self) -> float:
        """Since the message came."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0


class Talk:
    """Messages and replies, of which a conversation holds the last prompt.

    Args:
      tokenizer: with a chat template.
      conversation: of the model, which nobody else uses.
      max_new_tokens: of a reply.
      sampling: how to sample.
      seed: names the random numbers; None draws them.

    Attributes:
      ready: is done when the conversation's programs are compiled; None where nothing compiles
        them ahead.
      system: the system message, if there is one.
      messages: the others.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        conversation: Conversation,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        seed: int | None = None,
    ) -> None:
        self._tokenizer, self.conversation = tokenizer, conversation
        self.max_new_tokens, self._sampling = max_new_tokens, sampling
        self._texts = TokenTexts(tokenizer)
        self._key = jax.random.key(secrets.randbits(32) if seed is None else seed)
        self.ready: Future[None] | None = None
        self.system: str | None = None
        self.messages: list[Message] = []
        self.replies = 0

    def tell(self, system: str | None) -> None:
        """Takes another system message from the next reply on; None is none.

        Raises:
          ValueError: the chat template takes none.
        """
        ids_of_talk(self._tokenizer, [*_as_system(system), {"role": "user", "content": "a"}])
        self.system = system

    def reset(self) -> None:
        """Forgets all messages but the system's."""
        self.messages = []
        self.conversation.forget()

    def whole(self) -> list[Message]:
        """All messages, the system's first."""
        return [*_as_system(self.system), *self.messages]

    def ask(
        self,
        message: str,
        show: Callable[[Step | None, list[str]], None],
        stopped: Callable[[], bool] = lambda: False,
    ) -> Reply:
        """The model's reply to a message.

        Both stay in the talk, also a reply that was stopped; but neither if nothing was written.

        Args:
          message: the user's.
          show: is given a step and the text of each of its tokens, as they come; and the text that
            was held back, in the end.
          stopped: says whether the reply is to end here.

        Raises:
          ValueError: the template refuses the talk, or the message leaves no room for a reply.
        """
        start = time.perf_counter()
        asked: Message = {"role": "user", "content": message}
        ids, kept, limit = self._fitting([*self.messages, asked])
        reply = Reply(dropped_messages=len(self.messages) + 1 - len(kept))
        if self._read(ids, reply, stopped):
            self._write(ids, limit, reply, show, stopped, start)
        reply.seconds = time.perf_counter() - start
        if reply.token_ids:
            self.messages = [*kept, {"role": "assistant", "content": reply.text}]
            self.replies += 1
        return reply

    def _fitting(self, messages: list[Message]) -> tuple[list[int], list[Message], int]:
        """The prompt's tokens, the messages in it, and how many tokens the reply may have.

        Where the context is full, the oldest messages are left out, each with its reply.
        """
        context = self.conversation.max_model_len
        wanted = min(self.max_new_tokens, context // 2)
        while True:
            ids = ids_of_talk(self._tokenizer, [*_as_system(self.system), *messages])
            if len(ids) + wanted <= context or len(messages) < 3:
                break
            messages = messages[2:]
        if len(ids) >= context:
            raise ValueError(
                f"the message makes a prompt of {len(ids)} tokens; it must be below the context of "
                f"{context}."
            )
        return ids, messages, min(self.max_new_tokens, context - len(ids))

    def _read(self, ids: list[int], reply: Reply, stopped: Callable[[], bool]) -> bool:
        """Reads a prompt; whether it was not stopped."""
        while self.ready is not None and not stopped():
            if wait([self.ready], _NOTICED_SECONDS).done:
                self.ready.result()
                self.ready = None
        if stopped():
            return False
        reading = self.conversation.read(ids)
        reply.cached_tokens = self.conversation.cached
        for _ in reading:
            if stopped():
                break
        reply.read_tokens = len(self.conversation.tokens) - reply.cached_tokens
        return not stopped()

    def _write(
        self,
        ids: list[int],
        limit: int,
        reply: Reply,
        show: Callable[[Step | None, list[str]], None],
        stopped: Callable[[], bool],
        start: float,
    ) -> None:
        detokenizer = Detokenizer(self._texts, ids)
        key = self._key if not self.replies else jax.random.fold_in(self._key, self.replies)
        steps = self.conversation.write(key, max_new_tokens=limit, sampling=self._sampling)
        texts: list[str] = []
        done = False
        for step in steps:
            if reply.seconds_to_first_token is None:
                reply.seconds_to_first_token = time.perf_counter() - start
            tokens = step.tokens[0, : step.count[0]].tolist()
            pieces = [detokenizer.add(token) for token in tokens]
            reply.token_ids += tokens
            reply.steps, reply.last, done = reply.steps + 1, step, bool(step.done[0])
            texts += pieces
            show(step, pieces)
            if stopped():
                break
        if done:
            ends = self.conversation.end_ids
            reply.finish_reason = "stop" if reply.token_ids[-1] in ends else "length"
        texts.append(detokenizer.flush())
        show(None, texts[-1:])
        reply.text = "".join(texts)


def _as_system(text: str | None) -> list[Message]:
    return [] if text is None else [{"role": "system", "content": text}]
