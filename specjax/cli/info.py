"""`specjax info` and `specjax check-pair`: what a pair is, what it takes, and whether it fits."""

import bisect
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.cpu import products
from specjax.checkpoints import gguf, huggingface, skipped_layers
from specjax.checkpoints.feature_drafts import draft_config
from specjax.checkpoints.files import CheckpointError, Files
from specjax.checkpoints.load import check_activations_for
from specjax.checkpoints.offload.load import check_offload
from specjax.checkpoints.offload.memory import Division, division, dtype_of_layers
from specjax.checkpoints.pair import Pair, named, own_by_default
from specjax.checkpoints.self_drafts import self_bytes
from specjax.checkpoints.tokenizers import VocabularyMatch, compared, vocabulary_of
from specjax.cli.ahead import NEW, check_serve, compile_for, compiled_for, length_of, on_a_cpu, said
from specjax.cli.loading import pair_of
from specjax.cli.options import CheckPair, Info
from specjax.cli.values import at_least, bytes_of, dtype_of
from specjax.decoding.expert_use import experts_taken
from specjax.decoding.request import PROMPT_BUCKETS, room
from specjax.measure.timing import weight_bytes
from specjax.methods import records
from specjax.methods.choice import Asked, choose
from specjax.methods.draftless import bundled
from specjax.models import memory
from specjax.models.config import Features, ModelConfig
from specjax.models.experts import expected_experts
from specjax.models.families.mimo import mtp_config
from specjax.models.memory import Load, Plan, readable
from specjax.models.placement import Placement, placement
from specjax.models.quantized import quantized_as
from specjax.parallel.mesh import mesh_of
from specjax.parallel.processes import devices_for

_NODES = 16
"""Nodes of the trees that `check-pair` reckons with, root included."""
_PASSES = (1, 4, 16, 64)
"""Nodes of passes whose experts `info` counts, root included."""


def info(options: Info) -> int:
    """Runs `specjax info`; gives the exit code.

    The memory is printed, and refused, before any of it is taken.

    Raises:
      ValueError: an option is wrong, the pair does not fit, or there is too little memory.
    """
    check_serve(options)
    if options.compile_for is not None:
        return compile_for(options)
    for name in ("batch", "length", "nodes"):
        at_least(f"--{name}", getattr(options, name), 1)
    check_activations_for(options.activations, options.offloaded)
    mesh = devices_for(options.mesh, options.distributed)
    found = named(options.model, options.draft, lora=options.lora)
    target = huggingface.read_config(found.target.path, options.positions)[0]
    drafts = [draft_config(each, target) for each in found.drafts]
    pairs = list(zip(found.drafts, drafts, strict=True))
    loads = _loads((found.target, target), pairs, options.dtype, mesh)
    streamed, own = None, found.own
    if options.offloaded:
        held, streamed = _offloaded(options, found.target, target, mesh)
        loads = held, loads[1]
        if options.draft is None and streamed.ring:
            own = own_by_default(found, target)
    loads[1].extend(_own_load(target, bits) for bits in own)
    drafts += [target] * len(own)
    for text in found.skips:  # all layers where it is not known yet which are left out
        skipped = skipped_layers.layers_of(text, target.num_layers) if text else ()
        drafts.append(skipped_layers.config_without(target, skipped))
        loads[1].append(Load(placement(drafts[-1], None), loads[0].dtype, held=0))
    if found.has_mtp:
        drafts.append(mtp_config(target))
        small = jnp.dtype(huggingface.default_draft_dtype())
        loads[1].append(Load(placement(drafts[-1], mesh, split=False), small))
    plan_for = partial(_plan, loads, options.batch, options.nodes)
    most = _most(target)
    length = min(options.length or most, most)
    needed = plan_for(length)
    longest = _longest(plan_for, needed.available, most)
    sizes = _sizes(target, drafts, needed) | {"length": length, "longest_text": longest}
    if gguf.is_gguf(found.target.path):
        sizes["tensor_types"] = gguf.types_in(found.target.path)
    if streamed is not None:
        sizes |= {
            "layers_in_memory": streamed.resident, "layers": target.num_layers,
            "ring_bytes": streamed.ring, "read_a_pass_bytes": streamed.bytes_a_pass,
        }  # fmt: skip
        if streamed.slots:
            sizes |= {"experts_in_memory": sum(streamed.slots.values())}
    if longest < (1 if options.length is None else length):
        _print(sizes, options.json)
        memory.check(needed.total, needed.available, f"texts of {length} tokens and the weights")
    if options.json:
        _print(sizes | _chosen(options, mesh), True)
    else:
        _print(sizes, False)
        _print(_chosen(options, mesh), False)
    return 0


_Described: TypeAlias = tuple[Files, ModelConfig]
"""A model's files, and what its configuration says."""


def _loads(
    target: _Described, drafts: Sequence[_Described], dtype: str | None, mesh: Mesh | None
) -> tuple[Load, list[Load]]:
    """How a target and its drafts are held, these in their own dtype whatever the target's."""
    (files, config), small = target, huggingface.default_draft_dtype()
    kind = dtype_of(dtype) or huggingface.default_dtype()
    held = _load(files, placement(config, mesh), kind, huggingface.may_keep_bfloat16(kind))
    return held, [_load(own, placement(each, mesh, split=False), small) for own, each in drafts]


def _load(files: Files, placed: Placement, dtype: str, keeps_bfloat16: bool = False) -> Load:
    held = huggingface.held_bytes(files, dtype, keeps_bfloat16)
    return Load(placed, jnp.dtype(dtype), held=held)


def _offloaded(
    options: Info | CheckPair, files: Files, config: ModelConfig, mesh: Mesh | None
) -> tuple[Load, Division]:
    """How a target is held whose layers do not all stay in memory.

    Raises:
      CheckpointError: there is no room for what lies outside the layers and for streaming.
      ValueError: it cannot be offloaded so.
    """
    size = bytes_of("--memory", options.memory)
    check_offload(options.offload, size, mesh=mesh, positions=options.positions)
    kind = dtype_of_layers(files, dtype_of(options.dtype))
    shared = division(files, config, kind, size, options.offload)
    return Load(placement(config, None), kind, held=shared.total, streamed=True), shared


def _own_load(config: ModelConfig, bits: int) -> Load:
    """How the target in so many bits is held, as its own draft."""
    kind = jnp.dtype(huggingface.default_dtype())
    return Load(placement(config, None), kind, held=self_bytes(config, bits))


def _most(target: ModelConfig) -> int:
    """Tokens of the longest text that a model can have."""
    return min(target.max_positions, PROMPT_BUCKETS[-1])


def _plan(loads: tuple[Load, list[Load]], rows: int, nodes: int, length: int) -> Plan:
    """The memory of texts of which the last `NEW` tokens at most are new, as it is rounded up."""
    new = min(NEW, max(1, length - 1))
    positions = loads[0].placed.config.max_positions
    width, _, slots = room(max(1, length - new), new, nodes, positions)
    return memory.plan(*loads, rows, width, slots, nodes)


def _longest(plan_for: Callable[[int], Plan], spare: int | None, most: int) -> int:
    """The longest texts, of `most` tokens at most, whose plan fits into `spare` bytes."""
    if spare is None:
        return most
    return bisect.bisect_right(range(1, most + 1), spare, key=lambda n: plan_for(n).total)


def _sizes(target: ModelConfig, drafts: Sequence[ModelConfig], needed: Plan) -> dict[str, Any]:
    given = {f.name: f.default for f in dataclasses.fields(target)}
    config = {
        name: value
        for name, value in dataclasses.asdict(target).items()
        if given[name] is dataclasses.MISSING or getattr(target, name) != given[name]
    }
    sizes = {f"{name}_bytes": value for name, value in needed._asdict().items()}
    return {
        "config": config,
        "parameters": target.num_parameters,
        "drafts": [draft.num_parameters for draft in drafts],
        **sizes,
        "total_bytes": needed.total,
        "device": f"{jax.default_backend()}: {jax.devices()[0].device_kind}",
        "products": products(),
    }


def _chosen(options: Info, mesh: Mesh | None) -> dict[str, Any]:
    pair = pair_of(options, dtype_of(options.dtype), mesh)

    def chosen(temperature: float) -> str:
        choice = choose(Asked(), pair, temperature, options.batch)
        return f"{choice.setting.label} ({choice.reason})"

    return {
        "dtype": str(pair.target.embedding.dtype),
        "quantization": quantized_as(pair.target) or "none",
        "method_greedy": chosen(0.0),
        "method_sampled": chosen(0.8),
        **_of_experts(pair),
        **_measurements(pair, options.batch),
    }


def _of_experts(pair: Pair) -> dict[str, Any]:
    """What passes over more nodes read of a mixture: of one in memory along bundled prompts, of
    others if each expert were as likely as any.
    """
    target = pair.target
    experts = target.config.experts
    if experts is None:
        return {}
    if target.is_offloaded or mesh_of(target) is not None:
        taken = tuple(expected_experts(experts, nodes) for nodes in _PASSES)
    else:
        taken = experts_taken(target, bundled(pair).tokens, _PASSES)
    read = [weight_bytes(target, nodes, own) for nodes, own in zip(_PASSES, taken, strict=True)]
    return {
        "active_parameters": target.config.num_active_parameters,
        "experts": experts.num_experts,
        "experts_by_nodes": {n: round(own, 1) for n, own in zip(_PASSES, taken, strict=True)},
        "read_by_nodes_bytes": dict(zip(_PASSES, read, strict=True)),
    }


def _measurements(pair: Pair, batch: int) -> dict[str, Any]:
    """Where measurements of the pair are, and how they are forgotten."""
    file = records.RUNS.file
    if file is None:
        return {"cache_folder": "none: there is no home folder; name one with SPECJAX_CACHE"}
    names = [records.setting(pair.target, pair.drafts, batch, sampled) for sampled in (False, True)]
    kept = {name: runs for name in names if (runs := records.recall(name))}
    found: dict[str, Any] = {"cache_folder": str(file.parent), "measurements": "none of this pair"}
    estimates = records.FINDINGS.file
    if estimates is not None and estimates.exists():
        found["estimates"] = f"in {estimates}; delete it to have them made anew"
    if kept:
        dates = sorted(run.date[:10] for runs in kept.values() for run in runs)
        found["measurements"] = f"{len(dates)} of this pair in {file}, the last of {dates[-1]}"
        entries = " and ".join(f'"{name}"' for name in kept)
        found["to_forget_them"] = f"delete that file, or in it {entries}"
    return found


def _print(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        words = name.removesuffix("_bytes").replace("_", " ")
        print(f"{words}: {_readable(name, value)}")


def _readable(name: str, value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, dict):
        said = readable if name.endswith("_bytes") else str
        return ", ".join(f"{key} {said(entry)}" for key, entry in value.items())
    if name.endswith("_bytes"):
        return f"{readable(value)} of each device"
    if isinstance(value, list):
        return ", ".join(f"{entry:,}" for entry in value) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


class Finding(NamedTuple):
    """Something about a draft beside its target; `obstacle` if they cannot work together."""

    what: str
    said: str
    obstacle: bool = False


def check_pair(options: CheckPair) -> int:
    """Runs `specjax check-pair`; gives the exit code, 1 if a draft cannot work for the target.

    Configurations and tokenizers are read, weights are not.

    Raises:
      CheckpointError: a folder or file is missing or damaged, or an architecture not supported.
      ValueError: an option is wrong, or the mesh does not divide the target.
    """
    kind = dtype_of(options.dtype) or huggingface.default_dtype()
    on_a_cpu(options)
    mesh = devices_for(options.mesh if options.compile_for is None else None)
    found = named(options.target, ",".join(options.drafts))
    target = huggingface.read_config(found.target.path, options.positions)[0]
    vocabulary = vocabulary_of(found.target, target)
    report = {"target": _described(found.target, target, kind), "drafts": []}
    plain = True  # compiled with the first draft alone
    held = _loads((found.target, target), [], kind, mesh)[0]
    if options.offloaded:
        held = _offloaded(options, found.target, target, mesh)[0]
    for files in found.drafts:
        try:
            draft = draft_config(files, target)
        except CheckpointError:
            raise
        except ValueError as error:  # it is a head of another target
            found_wrong = Finding("target", str(error), True)._asdict()
            report["drafts"].append(
                {"draft": str(files.path), "works": False, "findings": [found_wrong]}
            )
            continue
        _, own = _loads((found.target, target), [(files, draft)], kind, mesh)
        if draft.features is not None:
            verdict = VocabularyMatch(True, "", target.vocab_size)
            findings = [*_on_features(draft, draft.features), _on_context(target, draft)]
        else:
            verdict = compared(vocabulary, vocabulary_of(files, draft))
            findings = [
                Finding("vocabulary", verdict.reason, not verdict.same),
                _on_ends(target, draft),
                _on_context(target, draft),
                *_on_windows(draft),
            ]
        if options.compile_for is None:
            findings.append(_on_memory((held, own), _most(target)))
        elif verdict.same:
            findings += _on_programs(options, found.target, target, draft, plain)
            plain = False
        works = not any(finding.obstacle for finding in findings)
        one = {"draft": _described(files, draft, huggingface.default_draft_dtype()), "works": works}
        report["drafts"].append(one | {"findings": [each._asdict() for each in findings]})
    report["works"] = all(one["works"] for one in report["drafts"])
    print(json.dumps(report)) if options.json else _tell(report)
    return 0 if report["works"] else 1


def _described(files: Files, config: ModelConfig, dtype: str) -> str:
    size = _load(files, placement(config, None), dtype).weights
    active = config.num_active_parameters
    read = "" if config.experts is None else f", of which a token reads {active:,}"
    return (
        f"{files.path}: {config.family}, {config.num_parameters:,} parameters{read} "
        f"({readable(size)} in {dtype}), {config.vocab_size:,} rows of vocabulary, "
        f"{config.max_positions:,} positions"
    )


def _on_ends(target: ModelConfig, draft: ModelConfig) -> Finding:
    ends = [", ".join(map(str, config.eos_ids)) or "none" for config in (target, draft)]
    if ends[0] == ends[1]:
        return Finding("end tokens", f"{ends[0]} in both")
    return Finding("end tokens", f"{ends[0]} and {ends[1]}; the model's count")


def _on_context(target: ModelConfig, draft: ModelConfig) -> Finding:
    if draft.max_positions >= target.max_positions:
        return Finding("context", f"{draft.max_positions:,} positions for {target.max_positions:,}")
    return Finding(
        "context",
        f"{draft.max_positions:,} positions for {target.max_positions:,}: past them the draft "
        "guesses poorly; the text stays the model's own",
    )


def _on_features(draft: ModelConfig, read: Features) -> Iterator[Finding]:
    """What a draft reads of the target, and which of its tokens it knows."""
    layers = ", ".join(map(str, read.layers))
    yield Finding("hidden states", f"those after {layers} layers, {read.size:,} numbers each")
    if (most := draft.block_levels) is not None:
        yield Finding("block_size", f"{most + 1}: a pass predicts {most} tokens, a level each")
    known = draft.draft_vocab_size or draft.vocab_size
    whose = "the model's" if read.shares_embedding else "its own"
    yield Finding(
        "vocabulary",
        f"it knows {known:,} of {draft.vocab_size:,} tokens; the embedding is {whose}",
    )


def _on_windows(draft: ModelConfig) -> Sequence[Finding]:
    windows = [window for window in draft.windows if window is not None]
    if not windows:
        return ()
    return (Finding("windows", f"trees have at most {min(windows) + 1} levels"),)


def _on_programs(
    options: CheckPair, files: Files, target: ModelConfig, draft: ModelConfig, plain: bool
) -> Iterator[Finding]:
    """What the programs of a pair take of hardware that is not here; obstacles if they do not fit.

    With `plain` decoding that is among them.
    """
    size = 1, length_of(None, target)
    report = compiled_for(options, files, target, [draft], size, plain)
    for one in report["programs"]:
        yield Finding(
            f"{report['hardware']}, {one['name']}",
            said(one, report["memory_bytes"]),
            not one["fits"],
        )


def _on_memory(loads: tuple[Load, list[Load]], most: int) -> Finding:
    """What one text takes; an obstacle where not even its first token fits."""
    plan_for = partial(_plan, loads, 1, _NODES)
    needed = plan_for(most)
    longest = _longest(plan_for, needed.available, most)
    said = (
        f"{readable(needed.total)} of each device with a text of {most:,} tokens, of which the "
        f"draft takes {readable(needed.draft_weights + needed.draft_caches)}"
    )
    if needed.available is not None:
        said += f"; here are {readable(needed.available)} to spare"
    if longest < most:
        weights = readable(needed.weights + needed.draft_weights)
        said += f", for {longest:,} tokens" if longest else f", and the weights take {weights}"
    return Finding("memory", said, not longest)


def _tell(report: dict[str, Any]) -> None:
    print(f"model {report['target']}")
    for number, one in enumerate(report["drafts"]):
        print(f"draft {number} {one['draft']}")
        for finding in one["findings"]:
            mark = "NO " if finding["obstacle"] else ""
            print(f"  {mark}{finding['what']}: {finding['said']}")
        print("  can draft for the model" if one["works"] else "  cannot draft for the model")
