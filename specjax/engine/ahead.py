"""An engine's step programs, compiled for hardware that is not here."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from specjax.draft.drafter import Drafter
from specjax.engine import programs
from specjax.engine.engine import setup_of, sizes_for, steps_of
from specjax.engine.programs import Given, Setup
from specjax.engine.state import EngineState, specs_of
from specjax.goodput.bursts import BURST
from specjax.goodput.chunks import PrefillBatch
from specjax.goodput.policy import StepShape
from specjax.measure.compile_ahead import Hardware, Program, abstract_pair, compiled_program, on
from specjax.methods.choice import shipped
from specjax.methods.registry import build
from specjax.methods.switch import switching
from specjax.models.config import ModelConfig
from specjax.models.transformer import Model
from specjax.parallel.mesh import DATA, size_of


class StepProgram(NamedTuple):
    """A step's program: for which setting, rows and columns, of which so many more are for tokens
    of prompts, and what came of compiling it.
    """

    shape: StepShape
    prompt_columns: int
    program: Program


class EngineOfShapes(NamedTuple):
    """An engine of shapes: its models and its rows' state, what is static in its programs, and its
    steps. `name` is that of its method where it has no settings.
    """

    target: Model
    drafter: Drafter
    state: EngineState
    setup: Setup
    steps: list[tuple[StepShape, PrefillBatch | None]]
    name: str | None


def engine_of_shapes(
    found: Hardware,
    mesh: Mesh,
    target: ModelConfig,
    drafts: Sequence[ModelConfig],
    dtype: str | None,
    settings: Sequence[str] | None,
    rows: int,
    tokens: int,
    temperature: float,
) -> EngineOfShapes:
    """An engine of `rows` rows of at most `tokens` tokens each.

    Its steps draft with one of `settings`, of which an empty sequence is all that the pair can;
    None is the method that `auto` takes for requests of such a temperature.

    Raises:
      ValueError: a setting cannot be used, the mesh does not divide the target or the rows.
    """
    model, pair = abstract_pair(found, mesh, target, drafts, dtype)
    with found.traced():
        alone = shipped(pair, temperature, rows).setting if settings is None else None

        def built(target: Model, drafts: list[Model]) -> Drafter:
            own = pair._replace(target=target, drafts=drafts)
            return switching(own, settings or ()) if alone is None else build(alone, own)

        drafter = on(jax.eval_shape(built, pair.target, pair.drafts), mesh)
        sizes = sizes_for(drafter, rows, tokens, size_of(mesh, DATA))
        setup = setup_of(model, drafter, sizes)
        state = _on_mesh(model, drafter, jax.eval_shape(
            partial(programs.empty, setup=setup, rows=sizes.texts), model, drafter
        ), mesh)  # fmt: skip
        steps = steps_of(drafter, rows, setup.shards)
    return EngineOfShapes(
        model, drafter, state, setup, steps, None if alone is None else alone.name
    )


def step_programs(found: Hardware, mesh: Mesh, own: EngineOfShapes) -> Iterator[StepProgram]:
    """Compiles every step of an engine."""
    for shape, mixed in own.steps:
        sizes = [
            ((shape.rows, 3), jnp.int32), ((), jnp.int32), ((), bool), ((2, 2), jnp.float32),
        ]  # fmt: skip
        static: dict[str, Any] = {"width": shape.width, "setting": shape.setting}
        more, columns = "", 0
        if mixed is not None:
            sizes.append(((BURST, mixed.rows, 2 + mixed.tokens), jnp.int32))
            static["columns"], columns = mixed.packed_columns, mixed.columns
            more = f" and {columns} of prompts"

        def step(
            target: Model,
            drafter: Drafter,
            state: EngineState,
            *given: Any,
            static: dict[str, Any] = static,
        ) -> tuple[EngineState, Given]:
            return programs.advance(target, drafter, state, own.setup, *given, **static)

        drafts_with = own.name or shape.setting
        name = f"{drafts_with}, rows {shape.rows}, columns {shape.width}{more}"
        jitted = jax.jit(step, donate_argnums=2)
        given = (on(jax.ShapeDtypeStruct(size, kind), mesh) for size, kind in sizes)
        made = compiled_program(found, name, jitted, own.target, own.drafter, own.state, *given)
        yield StepProgram(shape._replace(setting=drafts_with), columns, made)


def _on_mesh(target: Model, drafter: Drafter, state: EngineState, mesh: Mesh) -> EngineState:
    """A state of shapes that lie on a mesh as an engine's does."""
    return jax.tree.map(
        lambda spec, part: on(part, mesh, spec), specs_of(target, drafter), state,
        is_leaf=lambda each: isinstance(each, P),
    )  # fmt: skip
