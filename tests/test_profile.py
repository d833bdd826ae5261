"""Where a step's time goes, by the scopes of the compiled loop's operations."""

import json

import jax
import pytest

from benchmarks import step_overhead
from pallas_kernels import machine
from specjax.__main__ import main
from specjax.base.sampling import Sampling
from specjax.checkpoints.pair import load_pair
from specjax.decoding.generate import generate_jit
from specjax.decoding.request import prepare
from specjax.measure import profile
from specjax.methods import registry
from tests.folders import own_cache, pair_flags, pair_folder

__all__ = ["own_cache"]
PROGRAM = """
%body (at: f32[4]) -> f32[4] {
  %dot.1 = f32[4,1]{1,0} dot(%weight, %x), lhs_contracting_dims={1}
  %fusion.2 = f32[4,1]{1,0} fusion(%dot.1), metadata={op_name="jit(run)/while/body/step/score/pass/dot" stack_frame_id=3}
  %copy.9 = f32[4]{0} copy(%nobody)
  ROOT %add.3 = f32[4]{0} add(%fusion.2, %at), metadata={op_name="jit(run)/while/body/step/commit/add"}
}
"""  # noqa: E501


def test_an_operation_without_a_scope_has_that_of_its_user():
    scopes = profile.scopes_of(PROGRAM)
    assert profile.part_of(scopes["dot.1"]) == profile.part_of(scopes["fusion.2"]) == profile.TARGET
    assert profile.part_of(scopes["add.3"]) == profile.COMMITTING
    assert "copy.9" not in scopes


@pytest.mark.parametrize(
    ("scope", "part"),
    [
        ("jit(run)/pass/dot", None),  # the prefill
        ("jit(run)/while/body/step/score/tree_attention/dot", profile.TARGET),
        ("jit(run)/while/body/step/draft/while/body/pass/dot", profile.DRAFTS),
        ("jit(run)/while/body/step/commit/pass/dot", profile.DRAFTS),  # it catches up
        ("jit(run)/while/body/step/draft/top_k", profile.DRAFTING),
        ("jit(run)/while/body/step/verify/vmap()/while/body/div", profile.DECIDING),
        ("jit(run)/while/body/step/commit/dynamic_update_slice", profile.COMMITTING),
        ("jit(run)/while/body/step/add", profile.OTHER),
    ],
)
def test_a_scope_names_a_part(scope, part):
    assert profile.part_of(scope) == part


def test_an_instant_belongs_to_one_part():
    """A pass hides what runs beside it; what nothing hides is between operations."""
    scopes = {"dot.1": "step/score/pass", "sort.2": "step/draft/sort", "add.3": "step/verify/add",
              "while.4": "step/draft/while", "dot.5": "prefill/pass"}  # fmt: skip
    events = [("sort.2", 1.0, 3.0), ("dot.1", 2.0, 5.0), ("add.3", 6.0, 7.0), ("sort.2", 6.5, 7.5),
              ("while.4", 0.0, 9.0), ("dot.5", 0.0, 1.0), ("unknown.6", 8.0, 9.0)]  # fmt: skip
    found = profile.spent(events, scopes)
    assert found == {
        profile.TARGET: 3.0, profile.DRAFTS: 0.0, profile.DRAFTING: 2.0, profile.DECIDING: 0.5,
        profile.COMMITTING: 0.0, profile.OTHER: 0.0, profile.BETWEEN: 1.0,
    }  # fmt: skip


@pytest.mark.slow
def test_bench_tells_the_parts_of_a_traced_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(machine.READ_BYTES, "cpu", 2**20)
    out = tmp_path / "bench.json"
    flags = ["--methods", "chain", "--batch", "1", "--limit", "1", "--max-new-tokens", "10"]
    flags += ["--temperatures", "0.8", "--skip-phases", "--profile", "--json", str(out)]
    assert main(["bench", *flags, *pair_flags()]) == 0
    assert "A traced step in milliseconds" in capsys.readouterr().out
    plain, *_, chain = (row["profile"] for row in json.loads(out.read_text())["rows"])
    assert plain.keys() == chain.keys() == set(profile.PARTS)
    for part in profile.PARTS[:5]:
        drafting = part in (profile.DRAFTS, profile.DRAFTING)
        assert chain[part] > 0
        assert (plain[part] > 0) != drafting


def products_of(request) -> int:
    """The matrix products of a request's program."""
    static = {name: getattr(request, name) for name in ("rule", "outputs", "slots")}
    traced = jax.make_jaxpr(
        lambda *models_and_rows: generate_jit.__wrapped__(*models_and_rows, **static)
    )
    return str(traced(request.target, request.drafter, request.rows)).count("dot_general")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "temperature"), [("chain", 0.8), ("specexec", 0.0)])
def test_a_step_is_held_against_its_passes_alone(method, temperature, monkeypatch):
    """The loop of passes only multiplies as many matrices as the real one."""
    monkeypatch.setattr(step_overhead, "ROUNDS", 1)
    folder = pair_folder()
    pair = load_pair(f"{folder}/target", f"{folder}/two")
    drafter = registry.build(registry.setting_of(method), pair)
    asked = prepare(
        jax.random.key(0), pair.target, drafter, [[1, 2]], max_new_tokens=40,
        sampling=Sampling(temperature), stop_at_eos=False,
    )  # fmt: skip
    expected = products_of(asked)
    passes = step_overhead.passes_of(drafter, 2.5)
    with step_overhead.passes_only():
        assert products_of(asked._replace(drafter=passes)) == expected
    whole, alone, share = step_overhead.overhead(pair, method, temperature, "return a")
    assert min(whole, alone) > 0
    assert share < 1
