"""Fields that other servers honour, which would change a text, and which this one does not honour.

A request may give the values that change nothing; null always does.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Neutral(NamedTuple):
    """The values of a field that change nothing, and what to do instead of another.

    An object's fields in `harmless` change nothing either.
    """

    values: tuple[Any, ...] = ()
    instead: str = ""
    harmless: frozenset[str] = frozenset()


def _of(*values: Any, instead: str = "") -> Neutral:
    return Neutral(values, instead)


_FORMAT = "Give response_format."
_TOOLS = "Give tools."
_LENGTH = "Give max_tokens."
_BY_THEMSELVES = "Give its fields by themselves, with OpenAI's names."
_OF_DEVICES = frozenset(
    ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "use_mmap")
)
"""Ollama's options that change no text."""

_FORMATS = dict.fromkeys(
    ("format", "structural_tag", "guided_decoding", "response_schema"),
    _of("", {}, instead=_FORMAT),
)
_LENGTHS = dict.fromkeys(
    ("max_new_tokens", "max_output_tokens", "max_length", "num_predict", "n_predict"),
    _of(instead=_LENGTH),
)
_LEAST = dict.fromkeys(
    ("min_tokens", "min_new_tokens", "min_length", "min_completion_tokens"), _of(0)
)
_OFF_AT_ZERO = dict.fromkeys(
    (
        *("mirostat", "mirostat_mode", "dry_multiplier", "xtc_probability", "dynatemp_range"),
        *("top_a", "smoothing_factor", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "n_indent", "skew", "min_keep"),
        *("diversity_penalty", "num_beam_groups"),
    ),
    _of(0),
) | {name: _of(0, -1) for name in ("top_n_sigma", "nsigma", "adaptive_target", "t_max_predict_ms")}
_OFF_AT_ONE = dict.fromkeys(
    (
        *("typical_p", "typical", "tfs", "tfs_z", "guidance_scale", "cfg_scale", "num_beams"),
        "encoder_repetition_penalty",
    ),
    _of(1),
)
_FLAGS = dict.fromkeys(
    (
        *("use_beam_search", "include_stop_str_in_output", "no_stop_trim", "watermark"),
        *("watermarking", "temperature_last", "dynamic_temperature", "safe_prompt", "raw"),
        "return_full_text",
    ),
    _of(False),
)
_LISTS = dict.fromkeys(
    (
        *("bad_words", "bad_words_ids", "banned_tokens", "banned_strings", "custom_token_bans"),
        *("force_words_ids", "suppress_tokens", "lora", "adapters", "images"),
    ),
    _of([], ""),
)
_ONLY_NULL = dict.fromkeys(
    (
        *("allowed_token_ids", "truncate_prompt_tokens", "truncate", "custom_logit_processor"),
        *("logits_processors", "prompt_embeds", "stop_regex", "repetition_detection"),
        *("samplers", "sampler_priority", "sampler_order", "thinking_token_budget", "audio"),
        "thinking_budget",
        *(
            "prompt_logprobs",
            "lora_path",
            "adapter_id",
            "lora_request",
            "web_search_options",
            "chat_template",
        ),
        *("template", "forced_bos_token_id", "forced_eos_token_id", "session_params"),
    ),
    _of("", [], {}),
)
_TWINS: dict[str, Neutral] = {
    "repeat_penalty": _of(1, instead="Give repetition_penalty."),
    "rep_pen": _of(1, instead="Give repetition_penalty."),
    "stop_sequences": _of([], instead="Give stop."),
    "stop_strings": _of([], instead="Give stop."),
    "stop_sequence": _of([], instead="Give stop."),
    "random_seed": _of(-1, instead="Give seed."),
    "sampling_seed": _of(-1, instead="Give seed."),
    "do_sample": _of(True, instead="Give temperature 0."),
    "n_cmpl": _of(1, instead="Give n."),
    "num_return_sequences": _of(1, instead="Give n."),
    "ban_eos_token": _of(False, instead="Give ignore_eos."),
    "options": Neutral(({},), _BY_THEMSELVES, _OF_DEVICES),
    "parameters": Neutral(({},), _BY_THEMSELVES, frozenset({"details"})),
    "sampling_params": _of({}, instead=_BY_THEMSELVES),
    "extra_body": _of({}, instead=_BY_THEMSELVES),
    "system": _of("", instead="Give a message whose role is system."),
    "instructions": _of("", instead="Give a message whose role is system."),
    "negative_prompt": _of(""),
    "reasoning_budget": _of(-1),
    "thinking": _of(instead="Give it in chat_template_kwargs."),
    "think": _of(instead="Give it in chat_template_kwargs."),
    "reasoning": Neutral(({}, False), "Give reasoning_effort.", frozenset({"exclude", "summary"})),
}

GENERATION: Mapping[str, Neutral] = {
    **_FORMATS, **_LENGTHS, **_LEAST, **_OFF_AT_ZERO, **_OFF_AT_ONE, **_FLAGS, **_LISTS,
    **_ONLY_NULL, **_TWINS,
    "skip_special_tokens": _of(True),
    "spaces_between_special_tokens": _of(True),
    "suffix": _of(""),
    "functions": _of([], instead=_TOOLS),
    "function_call": _of("none", "auto"),
}  # fmt: skip
"""Of completions and chats."""

COMPLETION: Mapping[str, Neutral] = {
    **GENERATION,
    "tools": _of([], instead="Give them to /v1/chat/completions."),
    "messages": _of([], instead="Give them to /v1/chat/completions."),
    "max_completion_tokens": _of(instead=_LENGTH),
    "raw": _of(False, True),
}
"""Of completions."""

CHAT: Mapping[str, Neutral] = {
    **GENERATION,
    "n_predict": _of(-1, instead=_LENGTH),
    "prompt": _of("", [], instead="Give messages, or the prompt to /v1/completions."),
    "best_of": _of(1, instead="Give n."),
    "echo": _of(False),
    "add_generation_prompt": _of(True),
    "continue_final_message": _of(False),
    "modalities": _of(["text"]),
    "verbosity": _of("medium"),
}
"""Of chats."""

RESPONSE: Mapping[str, Neutral] = {
    "messages": _of([], instead="Give input."),
    "max_tokens": _of(instead="Give max_output_tokens."),
    "max_completion_tokens": _of(instead="Give max_output_tokens."),
    "response_format": _of(instead="Give text.format."),
    "background": _of(False),
    "conversation": _of(instead="Give previous_response_id."),
    "prompt": _of(instead="Give input."),
    "truncation": _of("disabled"),
    "top_logprobs": _of(0),
    "n": _of(1),
    "stop": _of([]),
    "context_management": _of([]),
    "moderation": _of({}),
}
"""Of responses."""

_CLEARED_BY_NONE = {"type": "clear_thinking_20251015", "keep": "all"}
MESSAGES: Mapping[str, Neutral] = {
    "max_completion_tokens": _of(instead=_LENGTH),
    "max_output_tokens": _of(instead=_LENGTH),
    "stop": _of([], instead="Give stop_sequences."),
    "response_format": _of(instead="Give output_config.format."),
    "output_format": _of(instead="Give output_config.format."),
    "reasoning_effort": _of(instead="Give output_config.effort."),
    "context_management": _of({}, {"edits": []}, {"edits": [_CLEARED_BY_NONE]}),
    "mcp_servers": _of([]),
    "container": _of(),
    "speed": _of("standard"),
    "n": _of(1),
}
"""Of `/v1/messages`."""

MESSAGE: Mapping[str, Neutral] = {
    "audio": _of(),
    "images": _of([]),
    "prefix": _of(False),
    "partial": _of(False),
}
"""Of a chat's messages."""

TOKENIZE: Mapping[str, Neutral] = {
    "chat_template": CHAT["chat_template"],
    "continue_final_message": CHAT["continue_final_message"],
}
"""Of `/tokenize`."""
