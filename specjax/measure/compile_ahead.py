"""Programs compiled for hardware that is not here: the memory they take, and what is in them.

Nothing is allocated and nothing runs: the arguments are shapes. It says what a compiler refuses,
how long it takes, what memory a program will take and which collectives it holds; never how fast it
is. TPUs need the package libtpu, NVIDIA's GPUs the CUDA plugin of jax; neither needs a device.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.platform import DEVICES, traced_for
from specjax.base.pytree import unchecked
from specjax.base.sampling import Sampling
from specjax.checkpoints.huggingface import default_draft_dtype, default_dtype
from specjax.checkpoints.pair import Pair
from specjax.decoding.generate import generate_jit
from specjax.decoding.request import Limits, Request, Rows, room, rule_of
from specjax.draft.drafter import Drafter
from specjax.measure.operations import COLLECTIVES, counted_loops_of, kernels_of, operations_of
from specjax.methods.choice import shipped
from specjax.methods.method import Setting
from specjax.methods.registry import build
from specjax.models import memory
from specjax.models.config import CONTEXT, ModelConfig
from specjax.models.placement import placement
from specjax.models.stacking import fused, fuses, stacked, stacks
from specjax.models.transformer import Model, initialize
from specjax.parallel.mesh import AXES, ROWS, check_rows, layout_of
from specjax.verify.rules import AUTO

_H100_BYTES = 84_942_979_072
_H100 = f"""
gpu_device_info {{
  cuda_compute_capability {{ major: 9 }}
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: {_H100_BYTES}
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""What XLA wants to know of an H100 SXM: NVIDIA's published limits of compute capability 9.0."""


class Kind(NamedTuple):
    """A kind of device: what compiles for it, and how.

    Attributes:
      memory_bytes: what programs may take, as its compiler says.
      topology: the smallest that can be described.
      package: what compiles for it.
      install: the command that installs that.
      options: the compiler's.
    """

    memory_bytes: int
    topology: str
    package: str
    install: str
    options: Mapping[str, str]


_TPU = ("libtpu", "pip install 'specjax[tpu]'", {})
_CUDA = ("jax_cuda13_plugin", "pip install 'specjax[cuda]'", {"xla_gpu_autotune_level": "0"})
KINDS = {
    "v5e": Kind(int(15.75 * 2**30), "2x2", *_TPU),
    "v6e": Kind(int(31.25 * 2**30), "2x2", *_TPU),
    "h100": Kind(_H100_BYTES, "1", *_CUDA),
}
"""Kinds of devices that programs are compiled for."""


_QUIET = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
"""What libtpu is told where there is no TPU: that several processes may have it, to ask no host for
one, and to warn of nothing."""


HERE = "here"
"""The device at hand, whatever it is."""


class Hardware(NamedTuple):
    """Devices to compile for: their kind, and a description of each, or those at hand."""

    name: str
    kind: str
    devices: tuple[Any, ...]

    @property
    def memory_bytes(self) -> int | None:
        """Memory of each device; what one at hand has to spare, None if that is not known."""
        if self.kind == HERE:
            return memory.available(None)
        return KINDS[self.kind].memory_bytes

    def traced(self) -> contextlib.AbstractContextManager[None]:
        """Traces for such a device."""
        return contextlib.nullcontext() if self.kind == HERE else traced_for(DEVICES[self.kind])

    def mesh(self, *, data: int = 1, model: int = 1, draft: int = 1) -> Mesh:
        """A mesh of the first devices, with all three axes.

        Raises:
          ValueError: there are fewer devices.
        """
        sizes = data, model, draft
        if math.prod(sizes) > len(self.devices):
            raise ValueError(
                f"the mesh needs {math.prod(sizes)} devices; {self.name} has {len(self.devices)}."
            )
        devices = np.asarray(self.devices[: math.prod(sizes)], object).reshape(sizes)
        return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)


def hardware(name: str) -> Hardware:
    """The devices that a name such as "v5e", "v5e:2x2" or "h100" describes.

    Without a size it is one device.

    Raises:
      ValueError: the kind or its size is unknown, or what compiles for it is not installed.
    """
    kind, _, size = name.partition(":")
    if name == HERE:
        return Hardware(name, kind, tuple(jax.devices()))
    if kind not in KINDS:
        raise ValueError(f"{name!r} is no known hardware; there are {', '.join(KINDS)}.")
    found = KINDS[kind]
    if size and not re.fullmatch(r"\d+(x\d+)*", size):
        raise ValueError(f"{name!r} is not a kind and a size such as v5e:2x2.")
    if importlib.util.find_spec(found.package) is None:
        raise ValueError(
            f"compiling for {kind} needs {found.package}, which is not installed: {found.install}."
        )
    for flag, value in _QUIET.items():
        os.environ.setdefault(flag, value)
    try:
        devices = _devices(kind, size or found.topology)
    except Exception as error:  # of a compiler, of whatever kind
        raise ValueError(f"{name} has no such topology: {str(error).splitlines()[0]}") from error
    return Hardware(name, kind, devices if size else devices[:1])


@functools.cache
def _devices(kind: str, size: str) -> tuple[Any, ...]:
    """Descriptions of devices; two of one device are not the same to jax."""
    if DEVICES[kind].platform == "tpu":
        made = topologies.get_topology_desc(platform="tpu", topology_name=f"{kind}:{size}")
    else:
        count = math.prod(map(int, size.split("x")))
        made = topologies.get_topology_desc(
            platform="cuda", topology_name="", topology=f"1x1x{count}", target_config=_H100
        )
    return tuple(made.devices)


def on(tree: Any, mesh: Mesh, spec: P = P()) -> Any:
    """Shapes that lie on a mesh."""
    return jax.tree.map(lambda leaf: _placed(leaf, mesh, spec), tree)


def _placed(leaf: Any, mesh: Mesh, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def abstract(config: ModelConfig, dtype: str = "float32") -> Model:
    """A model of shapes alone."""
    return jax.eval_shape(lambda: initialize(jax.random.key(0), config, jnp.dtype(dtype)))


def abstract_target(config: ModelConfig, dtype: str, mesh: Mesh) -> Model:
    """A target of shapes that lie on a mesh as its weights would, stacked or fused where
    they are.

    Raises:
      ValueError: the mesh does not divide its heads, key/value heads or features.
    """
    placed = placement(config, mesh)
    model = abstract(placed.config, dtype)
    if stacks(config):
        model = jax.eval_shape(stacked, model)
    elif fuses(placed):
        model = jax.eval_shape(fused, model)
    lead = (None,) if model.is_stacked else ()

    def lie(path: Sequence[Any], leaf: Any) -> jax.ShapeDtypeStruct:
        names = [part.name for part in path if hasattr(part, "name")]
        spec = placed.spec(names[-1])
        return _placed(leaf, mesh, P(*lead, *spec) if names[0] == "stack" else spec)

    model = jax.tree_util.tree_map_with_path(lie, model)
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return unchecked(Model, **{**fields, "axis": placed.axis, "repeats": placed.repeats})


def abstract_draft(config: ModelConfig, dtype: str | None = None) -> Model:
    """A draft of shapes alone, as it is loaded there (see `load_draft`)."""
    model = abstract(config, dtype or default_draft_dtype())
    reads_context = config.features is not None and config.features.way == CONTEXT
    alone = fuses(placement(config, None)) and not reads_context
    return jax.eval_shape(fused, model) if alone else model


class Texts(NamedTuple):
    """The texts of a request: how many, tokens of their prompts, and new ones at most."""

    rows: int = 1
    prompt: int = 2048
    new: int = 128
    temperature: float = 0.8


def abstract_request(target: Model, drafter: Drafter, texts: Texts, rule: str = AUTO) -> Request:
    """A request of shapes alone, on the mesh of `target` if it is on one."""
    width, outputs, slots = room(
        texts.prompt, texts.new, drafter.window, target.config.max_positions
    )
    count = texts.rows

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), count))
    sampling = jax.eval_shape(lambda: Sampling(np.float32(texts.temperature)).rows(count))
    limits = unchecked(Limits, max_new_tokens=array(count), end_ids=array(count, 0))
    rows = unchecked(
        Rows, prompt=array(count, width), length=array(count), key=keys, sampling=sampling,
        limits=limits, counts=None,
    )  # fmt: skip
    layout = layout_of(target, drafter)
    if layout is not None:
        rows = on(rows, layout.mesh, ROWS)
    return Request(target, drafter, rows, rule_of(rule, drafter), outputs, slots, layout)


@dataclasses.dataclass
class Compiled:
    """What compiling gave: seconds, bytes of each device, and how often each operation is in it.

    Of its loops (`while`) so many are `counted_loops`, whose length is known as they are compiled.
    `kernels` are what a run starts on a device (see `specjax.measure.operations.kernels_of`).
    """

    trace_seconds: float
    lower_seconds: float
    compile_seconds: float
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    operations: dict[str, int]
    counted_loops: int
    kernels: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """What a device holds while it runs."""
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temporary_bytes

    @property
    def collectives(self) -> dict[str, int]:
        """What passes between devices, and how often."""
        counted = self.operations.items()
        return {name: n for name, n in counted if name.removesuffix("-start") in COLLECTIVES}

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.trace_seconds + self.lower_seconds + self.compile_seconds


def compiled(found: Hardware, program: Any, *arguments: Any) -> Compiled:
    """Traces, lowers and compiles a jitted `program` of shapes that lie on such devices.

    Raises:
      jax.errors.JaxRuntimeError: the compiler refuses it, for instance as it does not fit.
    """
    platforms = options = None
    if found.kind != HERE:
        platform, options = DEVICES[found.kind].platform, dict(KINDS[found.kind].options)
        platforms = ("cuda" if platform == "gpu" else platform,)
    begin = time.perf_counter()
    with found.traced():
        trace = program.trace(*arguments)
        after_trace = time.perf_counter()
        lowered = trace.lower(lowering_platforms=platforms)
    after_lower = time.perf_counter()
    with _compiled_anew():
        made = lowered.compile(compiler_options=options)
    end = time.perf_counter()
    taken, text = made.memory_analysis(), made.as_text()
    return Compiled(
        after_trace - begin, after_lower - after_trace, end - after_lower,
        taken.argument_size_in_bytes, taken.output_size_in_bytes, taken.alias_size_in_bytes,
        taken.temp_size_in_bytes, dict(operations_of(text)), counted_loops_of(text),
        dict(kernels_of(text)),
    )  # fmt: skip


@contextlib.contextmanager
def _compiled_anew() -> Iterator[None]:
    """Leaves out the cache of compiled programs, whose seconds would be those of reading a file.

    Programs for hardware that is not here cannot even be read from it.
    """
    used = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax asks once whether there is one
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", used)
        compilation_cache.reset_cache()


class Program(NamedTuple):
    """A program for the devices of a mesh: what it is, and what came of it or why it is refused."""

    name: str
    made: Compiled | None
    refused: str | None


def programs(
    found: Hardware,
    mesh: Mesh,
    target: ModelConfig,
    drafts: Sequence[ModelConfig],
    dtype: str | None,
    texts: Texts,
    plain: bool = True,
) -> Iterator[Program]:
    """Compiles the whole `generate` of plain decoding, and of what `auto` takes for the drafts.

    That is for greedy rows and for sampled ones. Without `plain` decoding, what the drafts are for
    alone. `dtype` is the target's (see `abstract_pair`).

    Raises:
      ValueError: the mesh does not divide the target or the rows.
    """
    model, pair = abstract_pair(found, mesh, target, drafts, dtype)

    def built(setting: Setting, target: Model, drafts: list[Model]) -> Drafter:
        return build(setting, pair._replace(target=target, drafts=drafts))

    def asked(setting: Setting, temperature: float) -> Request:
        with found.traced():
            drafter = jax.eval_shape(partial(built, setting), pair.target, pair.drafts)
            request = abstract_request(
                model, on(drafter, mesh), texts._replace(temperature=temperature)
            )
        check_rows(request.layout, texts.rows)
        return request

    if plain:
        yield compiled_program(found, "plain", generate_jit, *asked(Setting(), 0.8))
    for temperature in (0.0, 0.8) if drafts else ():
        with found.traced():
            setting = shipped(pair, temperature, texts.rows).setting
        name = f"{setting.label} at temperature {temperature:g}"
        yield compiled_program(found, name, generate_jit, *asked(setting, temperature))


def abstract_pair(
    found: Hardware,
    mesh: Mesh,
    target: ModelConfig,
    drafts: Sequence[ModelConfig],
    dtype: str | None,
) -> tuple[Model, Pair]:
    """A target of shapes on a mesh, and a pair of shapes on none, to build drafters of.

    Dtypes are as when a pair is loaded there: `dtype` is the target's.

    Raises:
      ValueError: the mesh does not divide the target.
    """
    no_tokenizer: Any = None
    with found.traced():
        kind = dtype or default_dtype()
        own = [abstract_draft(_of_vocabulary(each, target)) for each in drafts]
        return abstract_target(target, kind, mesh), Pair(abstract(target, kind), no_tokenizer, own)


def compiled_program(found: Hardware, name: str, program: Any, *arguments: Any) -> Program:
    """What comes of compiling a program of shapes on such devices, or why it is refused."""
    try:
        return Program(name, compiled(found, program, *arguments), None)
    except jax.errors.JaxRuntimeError as error:  # of the compiler
        return Program(name, None, str(error).splitlines()[0])


def _of_vocabulary(draft: ModelConfig, target: ModelConfig) -> ModelConfig:
    """A draft whose table is made as long as the target's, as it is when it is loaded."""
    if draft.features is not None:  # the target's tables are as large as its own would be
        own = dataclasses.replace(draft.features, shares_embedding=False, shares_unembedding=False)
        return dataclasses.replace(draft, features=own)
    if draft.vocab_size == target.vocab_size:
        return draft
    if draft.draft_vocab_size is not None:
        return dataclasses.replace(draft, vocab_size=target.vocab_size)
    known = min(draft.vocab_size, target.vocab_size)
    return dataclasses.replace(draft, vocab_size=target.vocab_size, num_known=known)
