"""What a server is told: where it listens, who may ask, and the limits of a request."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of `run` and `create_app`.

    Attributes:
      served_model_name: what requests and `/v1/models` call the model.
      host: the address to listen at.
      port: its port; 0 takes a free one.
      api_keys: keys of which a request must bear one; none asks for none.
      allowed_origins: origins whose pages may read responses in a browser; `*` is every one.
      allowed_hosts: names that a request's Host may have beside localhost's; `*` is any.
      idle_seconds: after how long without an event a stream sends a comment.
      drain_seconds: how long running requests may go on after SIGTERM.
      strict_fields: whether requests with unknown fields are refused.
      defaults: what requests take that name none or null, by the names of requests: of
        temperature, top_p, top_k, min_p, repetition_penalty and max_tokens.
      tool_call_parser: how the model writes tool calls (`specjax.server.tools`); by default
        the one that the chat template tells of.
      reasoning: whether what a model thinks before it answers is told apart.
      debug: whether `POST /debug/speculation` may fix the setting.
      replica: of several servers that answer together, the name of this one, without a hyphen.
      max_body_bytes: of a request's body.
      body_seconds: how long a client may take to send it.
      max_choices: the largest `n`.
      max_prompts: the longest list of prompts.
      max_stops: the longest list of stop strings.
      max_stop_length: characters of a stop string.
      max_messages: of a chat.
      text_workers: processes that render chat templates and tokenize at once, beside two for what
        takes longer than half a second.
      text_seconds: how long one of them may take for a request.
      text_memory_bytes: how much memory, beyond what the tokenizer has.
    """

    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    idle_seconds: float = 5.0
    drain_seconds: float = 30.0
    strict_fields: bool = False
    defaults: Mapping[str, float | int] = dataclasses.field(default_factory=dict)
    tool_call_parser: str | None = None
    reasoning: bool = True
    debug: bool = False
    replica: str = ""
    max_body_bytes: int = 4 << 20
    body_seconds: float = 60.0
    max_choices: int = 16
    max_prompts: int = 64
    max_stops: int = 16
    max_stop_length: int = 256
    max_messages: int = 4096
    text_workers: int = 4
    text_seconds: float = 10.0
    text_memory_bytes: int = 1 << 30
