"""What the command line takes: a frozen dataclass a verb, and how their values are read."""

import contextlib
import dataclasses
import io
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import tyro

_FRAME = "│ "
_RULE = "╰─╯-"


def _help(text: str, values: Callable[[str], str] | None = None) -> Any:
    """The help of an option, and what follows it from its default: the values that it takes."""
    return tyro.conf.arg(help=text, help_behavior_hint=values)


def _of_methods(default: str) -> str:
    """Every method, from its record; read only when help is asked for."""
    from specjax.methods.method import METHODS

    listed = "; ".join(f"{method.name}: {method.summary}" for method in METHODS.values())
    return f"({listed}. default: {default})"


def _of_rules(default: str) -> str:
    """Every verification rule, from its record; read only when help is asked for."""
    from specjax.verify.rules import RULES

    listed = "; ".join(f"{rule.name}: {rule.summary}" for rule in RULES.values())
    return f"({listed}. default: {default})"


_Drafts: TypeAlias = Annotated[
    str | None,
    _help(
        "Draft model folders, separated by commas; self:4bit is the model itself in 4 bits, "
        "self:skip without some of its layers, self:skip=10-14,17 without these, self:mtp its "
        "layer of multi-token prediction; none is none. "
        "By default the bundled ones for the bundled model, and self:4bit for another "
        "that is offloaded.",
    ),
]

_Stage: TypeAlias = Annotated[
    str | None,
    _help(
        "Folders of an n-gram model and of a smaller draft, for the methods staged and ngram, and "
        "files of texts (.jsonl or plain) for retrieve, separated by commas. By default the "
        "bundled ones, for the bundled model.",
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """How much of a model's context is used."""

    positions: Annotated[
        int | None,
        _help(
            "Positions of the model's context to use; a LongRoPE model takes its long factors for"
            " more than the original ones. By default all, or those. Where a model's file "
            "stretches a context that it names, all of that may be used.",
        ),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapted:
    """What is merged into a model."""

    lora: str | None = None
    """A LoRA adapter of the model, a folder of peft's or a hub's org/name; it is merged into the
    weights as they are loaded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activations:
    """What multiplies a model's quantized weights."""

    activations: str | None = None
    """What multiplies the model's weights of 8 and 4 bits on a CPU: float; bfloat16, the default
    where the processor multiplies such numbers; or int8, each 32 inputs of a token rounded with a
    scale of their own, as in llama.cpp."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded(Adapted, Activations):
    """A model, and what drafts for it."""

    model: str = "bundled"
    """"bundled", a Hugging Face folder, a GGUF file, or a hub's org/name, org/name@revision or
    org/name:FILE.gguf."""
    draft: _Drafts = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staged:
    """What drafts for a draft."""

    stage: _Stage = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dtype:
    """What a model's weights are held in."""

    dtype: str | None = None
    """float32 or bfloat16. By default float32 on a CPU, else bfloat16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """The method and the rule of one run."""

    method: Annotated[str, tyro.conf.arg(help_behavior_hint=_of_methods)] = "auto"
    """What drafts, as METHOD or METHOD:SIZE, such as specexec:15, chain:7 or tree:2,1,1; auto takes
    what bench measured as fastest here."""
    tree: Annotated[
        str | None,
        _help(
            "Children per level, such as 2,2,1,1, or one number a node, such as 3/2,1,0; for "
            "chain, tree, recycle, and for pool of every draft.",
        ),
    ] = None
    budget: int | None = None
    """Most nodes of a tree below its root; the drafts of a pool share them."""
    config: str | None = None
    """A file that tune wrote; it names the method for such a temperature."""
    verify: Annotated[str, tyro.conf.arg(help_behavior_hint=_of_rules)] = "auto"
    """The verification rule; auto takes the one that accepts most of what is lossless."""


@dataclasses.dataclass(frozen=True)
class Written:
    """A model that is written anew, and where."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """"bundled", a Hugging Face folder, a GGUF file, or a hub's org/name, org/name@revision or
    org/name:FILE.gguf."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER")]
    """Where to write it; --model takes this folder then."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """What a model runs on."""

    mesh: Annotated[
        str | None,
        _help(
            "Devices along the axes data (rows), model (heads and features of the target) and "
            "draft (the drafts of a pool), such as data=2,model=4.",
        ),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts(Devices):
    """What a model runs on, of several hosts perhaps."""

    distributed: Annotated[
        str | None,
        _help(
            "One command a host, HOST:PORT,PROCESSES,PROCESS with the coordinator's address; or "
            "auto, from SPECJAX_COORDINATOR, SPECJAX_PROCESSES and SPECJAX_PROCESS, or the "
            "cluster.",
        ),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offloaded:
    """Where a model's layers are that do not fit into memory."""

    offload: str | None = None
    """disk keeps the first layers of the model in memory, and reads the others in every pass; host
    keeps the first on the device, and moves the others there from the host's memory."""
    memory: str | None = None
    """Of an offloaded model's weights, such as 2GiB; by default half of what there is."""

    @property
    def offloaded(self) -> bool:
        """Whether either is named."""
        return (self.offload, self.memory) != (None, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ahead:
    """Hardware that is not here."""

    compile_for: Annotated[
        str | None,
        _help(
            "Compile the programs for hardware that is not here, such as v5e, v5e:2x2, v6e or h100 "
            "(without a size one device), and say what they take of its memory and whether they "
            "fit. --mesh is of its devices, by default all along model.",
        ),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Which kernels run."""

    kernels: Annotated[
        str,
        _help(
            "The implementation of tree attention: auto takes the fastest, which is measured where "
            "an accelerator runs a shape for the first time, xla is XLA's own everywhere; or one "
            "of tpu, hopper and triton."
        ),
    ] = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a model is to continue while it is measured."""

    prompts: str | None = None
    """A file of {"id", "prompt"} or {"id", "turns"} lines. By default the bundled prompts."""
    chat: bool = False
    """Give each as a user's message, by the model's chat template, and end answers where the model
    ends them; a plain prompt is continued past end tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Structured:
    """What a text must match."""

    schema: str | None = None
    """A file with a JSON schema that the text must match; - reads it from standard input."""
    regex: str | None = None
    """A regular expression that the whole text must match."""
    choice: tuple[str, ...] | None = None
    """The text must be one of these."""
    grammar: str | None = None
    """A file with a grammar that it must match, in Lark's notation or GBNF."""


@dataclasses.dataclass(frozen=True)
class Generate(Dtype, Drafting, Staged, Context, Loaded, Hosts, Offloaded, Kernels, Structured):
    """Continue PROMPT, token by token as they are accepted, exactly as the model alone would."""

    prompt: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PROMPT")]
    """The text to continue; - reads it from standard input."""
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Sample among this many tokens only; 0 is off."""
    top_p: float = 1.0
    """Sample among the likeliest tokens of this total probability; 1 is off."""
    min_p: float = 0.0
    """Leave out tokens below this share of the likeliest one's probability; 0 is off."""
    seed: int = 0
    """Names the random numbers: they are those of jax.random.key(seed)."""
    max_new_tokens: int = 128
    """Longest continuation, in tokens."""
    chat: bool = False
    """Give the prompt as a user's message, by the model's chat template."""
    json: bool = False
    """Print one JSON object and nothing else on standard output."""
    show_tree: bool = False
    """Draw the tree of every step."""


@dataclasses.dataclass(frozen=True)
class Chat(Dtype, Drafting, Staged, Context, Loaded, Devices, Kernels):
    """Talk with a model in the terminal or over a pipe; what was said stays in its cache."""

    prompt: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="MESSAGE")] = None
    """The first message; - is all of standard input. At a terminal the conversation goes on after
    it, but not with --json; without it each line of standard input is a message."""
    model: str = dataclasses.field(default="smollm2", kw_only=True)
    """A model with a chat template: a short name, a Hugging Face folder, a GGUF file, or a hub's
    org/name, org/name@revision or org/name:FILE.gguf."""
    system: str | None = None
    """The system message; /system changes it."""
    temperature: float | None = None
    """0 takes the most likely token. By default what the model's generation_config.json says, as
    for the other parameters of sampling, else 0."""
    top_k: int | None = None
    """Sample among this many tokens only; 0 is off."""
    top_p: float | None = None
    """Sample among the likeliest tokens of this total probability; 1 is off."""
    min_p: float | None = None
    """Leave out tokens below this share of the likeliest one's probability; 0 is off."""
    seed: int | None = None
    """Names the random numbers: those of the first reply are jax.random.key(seed)'s. By default
    others every time."""
    max_new_tokens: int | None = None
    """Longest reply, in tokens; by default what generation_config.json says, else 512."""
    max_model_len: int | None = None
    """Most tokens of what was said and a reply together, past which the oldest messages are left
    out; by default the model's context, 8,192 of it at most."""
    generation_config: Annotated[
        str,
        _help(
            "Where defaults of sampling come from: auto, the model's generation_config.json; none, "
            "nowhere; or a folder with such a file."
        ),
    ] = "auto"
    json: bool = False
    """Print one JSON object for each reply and nothing else on standard output."""


@dataclasses.dataclass(frozen=True)
class Bench(Asked, Staged, Context, Loaded, Devices, Offloaded, Kernels):
    """Measure every method against plain decoding, and remember the fastest for --method auto."""

    limit: int | None = None
    """Take this many prompts only."""
    methods: Annotated[str, tyro.conf.arg(help_behavior_hint=_of_methods)] = (
        "chain,tree,pool,specexec,lookup,hybrid"
    )
    """Methods, perhaps with a size, such as chain:7,tree:2,1,1,specexec, or all; plain decoding is
    always measured."""
    budgets: str | None = None
    """Budgets of nodes to compare, such as 16,64,256; every method without a size takes each."""
    config: str | None = None
    """Measure what this file, written by tune, names, beside the methods."""
    skip_phases: Annotated[
        bool,
        _help(
            "Leave out the phases of a step, whose compilation takes longer than the rest; on a "
            "mesh they are always left out.",
        ),
    ] = False
    profile: Annotated[
        bool,
        _help(
            "Trace the loop too, and report how long the passes of target and drafts, drafting "
            "beside them, deciding and committing take of a step; tracing slows small operations "
            "down most.",
        ),
    ] = False
    temperatures: str = "0,0.8"
    """Temperatures, separated by commas."""
    batch: Annotated[
        str | None,
        _help(
            "Rows per batch, separated by commas; above 1 a half greedy, half sampled batch is "
            "added. By default 1 and 8, or what of them a mesh can divide.",
        ),
    ] = None
    dtype: str | None = None
    """float32, bfloat16 or both, separated by a comma. Plain decoding is measured in both; of an
    offloaded model all is in one, by default its files' own."""
    verify: Annotated[str, tyro.conf.arg(help_behavior_hint=_of_rules)] = "auto"
    """The verification rule; auto takes the one that accepts most of what is lossless."""
    max_new_tokens: int = 128
    """Tokens of every continuation; of an answer with --chat at most."""
    inflate: str | None = None
    """Grow the model to this many parameters, such as 100M, without changing its function."""
    seed: int = 0
    """Prompt i samples with fold_in(jax.random.key(seed), i)."""
    json: str | None = None
    """Write the measurements to this file."""
    png: str | None = None
    """Draw tokens per step and speed-up against the nodes of a tree to this file."""


@dataclasses.dataclass(frozen=True)
class Tune(Asked, Dtype, Staged, Loaded, Offloaded, Kernels):
    """Find the fastest method, shape and budget for this machine and these prompts."""

    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """Where to write the configuration; generate, bench and verify read it with --config."""
    limit: int = 8
    """Take this many prompts only."""
    methods: Annotated[str, tyro.conf.arg(help_behavior_hint=_of_methods)] = "all"
    """Methods to choose among, separated by commas, without a size; plain decoding is one."""
    budgets: str | None = None
    """Budgets of nodes to choose among. By default 7,15,31,63, without a draft 1,3,7,15,31; of an
    offloaded model 15, the most that are computed while its layers are read, and twice as many, or
    3,7,15 where single experts are read."""
    temperatures: str = "0,0.8"
    """Temperatures to choose for, separated by commas."""
    batch: int = 1
    """Rows to choose for."""
    max_new_tokens: int = 128
    """Tokens of every continuation; of an answer with --chat at most."""
    inflate: str | None = None
    """Grow the model to this many parameters, such as 100M, without changing its function."""
    seed: int = 0
    """Prompt i samples with fold_in(jax.random.key(seed), i)."""


@dataclasses.dataclass(frozen=True)
class Verify(Staged, Context, Loaded, Hosts, Offloaded, Kernels):
    """Check on this very pair that speculative decoding changes nothing but speed."""

    methods: Annotated[str, tyro.conf.arg(help_behavior_hint=_of_methods)] = (
        "chain,tree,pool,specexec,hybrid"
    )
    """Methods, perhaps with a size, such as chain:3,specexec:15, or all."""
    tree: Annotated[
        str | None,
        _help(
            "Children per level of every static tree without a size, such as 2,2,1 or 3/2,1,0; by "
            "default each method's own.",
        ),
    ] = None
    budget: int | None = None
    """Most nodes of the other trees without a size, and of static ones where no tree is named."""
    config: str | None = None
    """Check what this file, written by tune, names, instead of methods."""
    verify: Annotated[
        str,
        _help(
            "Rules whose distribution is tested, separated by commas, or all; each where it is "
            "lossless. auto is the rule that each method has when none is named.",
        ),
    ] = "naive,auto"
    prompts: int = 8
    """How many of the bundled prompts the greedy part continues."""
    max_new_tokens: int = 64
    """Tokens of their continuations."""
    samples: int = 4096
    """Continuations drawn to test the distribution of their first tokens."""
    seed: int = 0
    """Names the random numbers."""
    json: bool = False
    """Print one JSON object and nothing else on standard output."""


@dataclasses.dataclass(frozen=True)
class Info(Dtype, Context, Loaded, Hosts, Offloaded, Ahead):
    """Show a model, its drafts, the memory they would take, and the method auto would choose."""

    batch: int = 1
    """Texts at once, for the memory they take."""
    length: int | None = None
    """Tokens of a text, of which 128 are new; by default the model's whole context."""
    nodes: int = 16
    """Nodes of a tree, its root included."""
    serve: bool = False
    """With --compile-for: compile the steps of a server instead, of --rows and --settings."""
    rows: int | None = None
    """Requests that the server runs at a time; 8 by default, as of serve."""
    settings: str | None = None
    """What each step chooses from, as of serve; by default the method that auto takes."""
    json: bool = False
    """Print one JSON object and nothing else on standard output."""


@dataclasses.dataclass(frozen=True)
class CheckPair(Context, Devices, Offloaded, Ahead):
    """Say whether drafts can work for a model: their vocabularies, contexts and memory."""

    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET")]
    """A Hugging Face folder, a GGUF file, a hub's org/name, org/name@revision or
    org/name:FILE.gguf, or "bundled"."""
    drafts: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="DRAFT")]
    """Drafts, named likewise."""
    dtype: Annotated[
        str | None,
        _help(
            "What the model's weights would be held in: float32 or bfloat16. By default float32 "
            "on a CPU, else bfloat16.",
        ),
    ] = None
    json: bool = False
    """Print one JSON object and nothing else on standard output."""


@dataclasses.dataclass(frozen=True)
class Shard(Dtype, Adapted, Hosts, Written):
    """Write a model with Orbax, by shards that every process reads its own of, on any mesh."""


@dataclasses.dataclass(frozen=True)
class Quantize(Written):
    """Write a model with its layers' matrices in 8 or 4 bits, as compressed-tensors has them."""

    bits: int = 4
    """Of a weight, 8 or 4."""
    group: int | None = None
    """Inputs that share a scale. By default 32 in 4 bits, and all of a row in 8."""
    kept: float | None = None
    """The share of the layers' weights that 4 bits leave in 8: those of the attention's inputs,
    then of what ends the feed-forward part. By default 0.4, and 0 where --group is named."""
    calibration: str | None = None
    """A JSONL file of texts ({"id", "prompt"} a line), by which 4 bits are chosen (GPTQ); or "self"
    for texts that the model writes, for which it has to fit in memory."""
    table: int | None = None
    """The bits of the embedding, and of an unembedding of its own: 8, with a scale for each row. By
    default they stay as they are."""


@dataclasses.dataclass(frozen=True)
class Inflate(Written):
    """Write a model grown to a size that nobody trained, with the logits of the small one."""

    parameters: str
    """How many, about, such as 2B."""
    experts: int | None = None
    """Experts of each layer: writes a mixture (Mixtral's form), each of whose experts computes what
    the small model's MLP does. By default there are none."""
    experts_per_token: int = 2
    """How many of them a token is routed to."""
    seed: int = 0
    """Of the noise where the function does not depend on a weight."""


@dataclasses.dataclass(frozen=True)
class Roofline(Dtype, Kernels):
    """Hold passes, plain steps and generations against the bandwidth measured in the same run."""

    shapes: Annotated[
        str | None,
        _help(
            "Shapes of random weights, separated by commas; by default none on a CPU, else "
            "llama-3.1-8b,llama-3.2-1b.",
        ),
    ] = None
    inflate: str | None = None
    """Sizes to grow the bundled target to; by default 100M on a CPU, else 1B,8B."""
    nodes: str = "1,16,64"
    """Nodes of the trees whose passes are timed."""
    slots: int | None = None
    """Tokens in the cache of those passes; by default 512 on a CPU, else 4096."""
    parts: str = "costs,generations"
    """What of the grown pair is measured, separated by commas; costs are passes and plain steps."""
    methods: str = "chain,specexec"
    """Methods to run end to end, separated by commas, perhaps with a size."""
    temperatures: str = "0,0.8"
    """Temperatures to run them at."""
    prompts: str | None = None
    """A file of {"id", "prompt"} or {"id", "turns"} lines. By default the bundled prompts."""
    limit: int = 8
    """Take this many prompts only."""
    max_new_tokens: int = 128
    """Tokens of every continuation."""
    seconds: float = 480.0
    """Begin no further model after so long; the rest is reported as owed."""
    json: str | None = None
    """Write the measurements to this file, row by row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engined:
    """An engine, and how requests to it are read."""

    rows: int = 8
    """Requests that run at a time."""
    settings: Annotated[
        str | None,
        _help(
            "Let each step draft with what gives most tokens a second, of these, separated by "
            "commas: METHOD or METHOD:SIZE, such as none,chain:3,tree:2,1,1,specexec:15; or all, "
            "for all of a few sizes that the pair can."
        ),
    ] = None
    tool_call_parser: Literal["hermes", "llama3_json", "mistral", "pythonic"] | None = None
    """How the model writes tool calls; by default as its chat template tells it to."""
    reasoning_parser: Literal["auto", "none"] = "auto"
    """Whether what a model thinks between <think> and </think> is told apart from its answer: where
    its chat template tells that it does, or never."""
    verify: Annotated[str, tyro.conf.arg(help_behavior_hint=_of_rules)] = "auto"
    """The verification rule; requests with a seed are decided by the naive one."""
    max_model_len: int | None = None
    """Most tokens of a prompt and its continuation together; by default the model's context, or as
    much of it as there is memory for, 2,048 at least."""
    page_size: int | None = None
    """Tokens of a page of the KV cache, which requests that begin alike share; 0 gives each of the
    rows room for --max-model-len instead. By default 64 on a CPU, 128 on a GPU, 512 on a TPU."""
    kv_cache_tokens: int | None = None
    """Tokens that all pages have room for, of four texts a row at most; by default as many as there
    is memory for, or all rows need. Requests wait for pages."""
    generation_config: Annotated[
        str,
        _help(
            "What requests take that name no temperature, top_p, top_k, min_p, repetition_penalty "
            "or limit of tokens: auto, what the model's generation_config.json says; none, what "
            "the API says; or a folder with such a file.",
        ),
    ] = "auto"
    served_model_name: str | None = None
    """What requests call the model; by default its folder's name, or its id on a hub."""


@dataclasses.dataclass(frozen=True)
class Batch(Dtype, Drafting, Staged, Context, Loaded, Devices, Kernels, Engined):
    """Answer a file of requests in OpenAI's batch format, as a server would."""

    requests: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="IN.jsonl")]
    """A line each: custom_id, method, url (/v1/chat/completions, /v1/completions, /v1/responses)
    and body."""
    answers: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT.jsonl")]
    """Where a line for each goes once it is answered. Those that are there already are kept: a run
    that was ended goes on."""


@dataclasses.dataclass(frozen=True)
class Serve(Dtype, Drafting, Staged, Context, Loaded, Devices, Kernels, Engined):
    """Serve a model over HTTP, as OpenAI's API: each text as the model alone would write it."""

    host: str = "127.0.0.1"
    """The address to listen at."""
    port: int = 8000
    """Its port; 0 takes a free one."""
    strict_fields: bool = False
    """Refuse requests with unknown fields; by default they are ignored, and named in the log."""
    debug: bool = False
    """Let POST /debug/speculation fix the setting."""
    allowed_origins: Annotated[
        str | None,
        _help(
            "Origins whose pages may use the API from a browser, separated by commas, such as "
            "https://app.example; * is every one. By default none."
        ),
    ] = None
    allowed_hosts: Annotated[
        str | None,
        _help(
            "Names that the Host header of requests may have beside localhost's, separated by "
            "commas; * is any. By default any, but none on a loopback address without a key."
        ),
    ] = None
    api_key: Annotated[
        str | None,
        _help(
            "Keys of which a request must bear one, separated by commas; by default those of the "
            "environment's SPECJAX_API_KEY, if any."
        ),
    ] = None
    max_waiting: int = 1024
    """Requests that may wait for a row; more are refused with 429."""
    max_waiting_tokens: int = 1 << 20
    """Tokens of their prompts."""
    drain_seconds: float = 30.0
    """How long running requests may go on after SIGTERM."""


@dataclasses.dataclass(frozen=True)
class BenchServe(Dtype, Staged, Loaded, Kernels):
    """Measure a server under load: settings at rates of requests, and its own choice of them."""

    prompts: str | None = None
    """A file of {"id", "prompt"} or {"id", "turns"} lines. By default the bundled prompts."""
    chat: bool = False
    """Give each as a user's message, by the model's chat template."""
    then: str | None = None
    """A file of prompts that take over for the second half of every run."""
    limit: int | None = None
    """Take this many prompts only, of each file."""
    rates: str = "0.25,0.5,0.75,0.9,1,1.2"
    """Rates of requests, as shares of what the server completes with all rows and no drafting."""
    settings: Annotated[
        str,
        _help(
            "Settings to compare, separated by commas: METHOD or METHOD:SIZE, such as specexec:15, "
            "and auto, the server's own choice. It chooses from what a server has by default; "
            "where a setting is named that is not among these, from those named."
        ),
    ] = "none,chain:1,chain:3,chain:7,specexec:15,auto"
    requests: int = 100
    """Requests of a setting at a rate in a turn."""
    turns: int = 3
    """How often all is measured; the settings of a rate run one after the other in each turn."""
    shape: str = "poisson"
    """How the rate changes during a run: poisson (not at all), steps, ramp or bursts."""
    temperature: str = "0"
    """Of all requests; or mixed: 0 and 0.8, at random."""
    max_tpot_ms: float | None = None
    """A latency target, milliseconds a token, that one request in two carries."""
    rows: int = 8
    """Requests that the server runs at a time."""
    max_new_tokens: int = 128
    """Mean tokens of a continuation; each has half to one and a half times as many."""
    inflate: str | None = None
    """Grow the model to this many parameters, such as 100M, without changing its function."""
    seed: int = 0
    """Names the random numbers of arrivals, prompts and lengths; sampling is the server's own."""
    json: str | None = None
    """Write the measurements to this file, as they come."""
    png: str | None = None
    """Draw mean latency and goodput against the rate of requests to this file."""


@dataclasses.dataclass(frozen=True)
class Models:
    """List the models that have short names: what they are, their licences, where they are here."""

    json: bool = False
    """Print one JSON object instead."""


Options: TypeAlias = (
    Generate | Chat | Serve | Bench | BenchServe | Tune | Verify | Info | CheckPair | Models
    | Shard | Quantize | Inflate | Roofline
)  # fmt: skip
VERBS = (
    Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Chat, tyro.conf.subcommand("chat")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Batch, tyro.conf.subcommand("batch")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[BenchServe, tyro.conf.subcommand("bench-serve")]
    | Annotated[Tune, tyro.conf.subcommand("tune")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Info, tyro.conf.subcommand("info")]
    | Annotated[CheckPair, tyro.conf.subcommand("check-pair")]
    | Annotated[Models, tyro.conf.subcommand("models")]
    | Annotated[Shard, tyro.conf.subcommand("shard")]
    | Annotated[Quantize, tyro.conf.subcommand("quantize")]
    | Annotated[Inflate, tyro.conf.subcommand("inflate")]
    | Annotated[Roofline, tyro.conf.subcommand("roofline")]
)


ABOUT = """Lossless speculative decoding with token trees: a model's own text, faster.

  specjax generate "def fibonacci(n):"    a small code model and its drafts are bundled
  specjax chat --model FOLDER             a conversation with a model of yours
  specjax serve                           the same over HTTP, as OpenAI's API
  specjax bench                           what is fastest on this machine
  specjax verify                          that nothing but the speed changes
"""
"""What `specjax --help` begins with."""


def parsed(
    kind: Any,
    prog: str,
    arguments: Sequence[str] | None,
    *config: Any,
    description: str | None = None,
) -> Any:
    """The options, an instance of `kind`, that arguments give; by default those of the process.

    Raises:
      SystemExit: after printing help, or with code 2 after one sentence on standard error.
    """
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                kind,
                prog=prog,
                args=arguments,
                description=description,
                config=(tyro.conf.FlagCreatePairsOff, *config),
            )
    except SystemExit as stop:
        if stop.code:
            print(f"{prog}: {_sentence(complaint.getvalue(), prog)}", file=sys.stderr)
        raise


def _sentence(panel: str, prog: str) -> str:
    """What the first part of a panel of tyro's says, on one line.

    Its parts end with a rule or with the frame; without a frame a rule is also below the title.
    """
    lines = [line.strip(_FRAME) for line in panel.splitlines()[1:]]
    if lines and not lines[0].strip(_RULE):
        del lines[0]
    message = " ".join(" ".join(itertools.takewhile(lambda line: line.strip(_RULE), lines)).split())
    return f"{message.rstrip('.')}; see {prog} --help."
