"""The plan of memory: what compiled programs take, what a host can give, what a text needs."""

import jax.numpy as jnp
import pytest

import specjax
from benchmarks.programs.memory_plan import CASES, LLAMA_8B, Case, drafter_of, found, lowered
from specjax.decoding.request import OUTPUT_BUCKETS, memory_plan, room, rule_of
from specjax.draft.plain import PlainDrafter
from specjax.models import memory
from specjax.models.placement import placement
from tests.cases import slow_but
from tests.conftest import tiny_model
from tests.hidden import HiddenDrafter

QUICK = ("prefill of 16,384", "prefill in bfloat16", "long texts", "plain", "chain", "chain, naive",
         "tree", "tree, one row", "pool", "specexec", "small vocabulary", "prefill of a mixture",
         "tree of a mixture", "tree of a wide mixture", "prefill of latents",
         "tree of latents")  # fmt: skip


@pytest.mark.parametrize(
    "name", slow_but(QUICK, "plain", "prefill in bfloat16", "prefill of a mixture")
)
def test_a_plan_is_what_the_program_takes_or_a_quarter_more(name):
    planned, compiled = found(CASES[name])
    assert compiled <= planned <= 1.25 * compiled


def test_a_streamed_models_plan_counts_its_process():
    placed, kind = placement(LLAMA_8B, None), jnp.dtype("bfloat16")
    whole, streamed = (
        memory.plan(memory.Load(placed, kind, held=10**9, streamed=each), [], 1, 64, 128, 16)
        for each in (False, True)
    )
    assert (whole.process, streamed.process) == (0, memory.STREAMED_PROCESS)
    assert streamed.total == whole.total + memory.STREAMED_PROCESS


def test_hidden_states_that_drafts_see_are_planned_for():
    """Of every token of prompts in float32, as each layer made them and one behind the other."""
    model = tiny_model()
    rule = rule_of("auto", PlainDrafter(model.config.vocab_size))
    one, two = (
        memory_plan(model, HiddenDrafter(model, layers), rule, 4, 256, 512)
        for layers in ((0,), (0, 2))
    )
    assert two.prompts - one.prompts == 2 * 4 * 4 * 256 * model.config.hidden_size


@pytest.mark.slow
def test_a_prefills_program_and_memory_grow_no_faster_than_its_prompt():
    cases = [Case(LLAMA_8B, "none", 1, size) for size in (4096, 8192)]
    programs = [lowered(case, drafter_of(case)) for case in cases]
    short, long = (len(program.as_text().splitlines()) for program in programs)
    assert long <= 1.01 * short
    short, long = (p.compile().memory_analysis().temp_size_in_bytes for p in programs)
    assert long <= 2.05 * short


@pytest.mark.parametrize("new", [1, 2049, *OUTPUT_BUCKETS])
@pytest.mark.parametrize("positions", [100, 4096, 131_072])
def test_slots_are_no_more_than_the_context_has(new, positions):
    """But for a prompt's own bucket, and the room that a last step needs."""
    prompt, window = 40, 8
    width, outputs, slots = room(prompt, new, window, positions)
    longest = min(width + outputs, max(width, positions)) + window
    assert longest <= slots < longest + 64
    assert room(2047, 2049, 8, 4096).slots == 4160


GIB = 2**30
MEMINFO = "MemTotal:  16777216 kB\nMemAvailable:  8388608 kB\n"
STAT = "anon 5\n{}inactive_file 1073741824\n{}active_file 0\nfile_dirty 7\n"


def machine(root, **files):
    """Files of a system; `__` in their names is a slash, `_DOT_` a dot."""
    for name, text in {"proc__meminfo": MEMINFO, **files}.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory.host(root)


def version_2(where, most, used=3 * GIB):
    at = f"sys__fs__cgroup{where}__memory_DOT_"
    return {f"{at}max": f"{most}\n", f"{at}current": f"{used}\n", f"{at}stat": STAT.format("", "")}


def test_a_host_without_groups_gives_what_is_available(tmp_path):
    assert machine(tmp_path) == 8 * GIB
    assert memory.host(tmp_path / "elsewhere") is None


def test_a_group_gives_its_limit_less_what_is_taken_but_for_files(tmp_path):
    own = {"proc__self__cgroup": "0::/jobs/one\n"}
    assert machine(tmp_path / "a", **own, **version_2("__jobs__one", 4 * GIB)) == 2 * GIB
    above = version_2("__jobs__one", "max") | version_2("__jobs", 5 * GIB)
    assert machine(tmp_path / "b", **own, **above) == 3 * GIB
    assert machine(tmp_path / "c", **own, **version_2("__jobs__one", 64 * GIB)) == 8 * GIB
    assert machine(tmp_path / "d", **own, **version_2("__jobs__one", GIB)) == 0


def test_a_container_sees_its_group_as_the_topmost(tmp_path):
    own = {"proc__self__cgroup": "0::/../outside\n"}
    assert machine(tmp_path / "a", **own, **version_2("", 4 * GIB)) == 2 * GIB
    own = {"proc__self__cgroup": "0::/\n"}
    assert machine(tmp_path / "b", **own, **version_2("", 4 * GIB)) == 2 * GIB


def test_groups_of_version_1(tmp_path):
    at = "sys__fs__cgroup__memory__docker__x__memory_DOT_"
    files = {
        "proc__self__cgroup": "9:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n1:name=systemd:/\n",
        f"{at}limit_in_bytes": str(4 * GIB),
        f"{at}usage_in_bytes": str(3 * GIB),
        f"{at}stat": STAT.format("total_", "total_") + "inactive_file 99\n",
    }
    assert machine(tmp_path, **files) == 2 * GIB


def test_an_engine_takes_the_longest_context_that_fits_its_rows(monkeypatch):
    """In multiples of 128, the model's whole one if it can, 2,048 at least; else it is refused."""
    model = tiny_model(max_positions=32_768 + 5)

    def contexts(spare, rows, **options):
        monkeypatch.setattr(memory, "host", lambda: spare)
        return specjax.Engine(model, None, rows=rows, **{"page_size": 0, **options}).max_model_len

    assert contexts(None, 8) == contexts(64 * GIB, 8) == 32_773
    plain = PlainDrafter(model.config.vocab_size)
    taken = memory_plan(model, plain, rule_of("auto", plain), 8, 128, 8192)
    few, many = contexts(2 * taken.beside_weights, 8), contexts(2 * taken.beside_weights, 32)
    assert 8192 < few < 32_768
    assert 2048 <= many < few / 2
    assert (few % 128, many % 128) == (0, 0)
    assert contexts(2 * taken.beside_weights, 8, max_model_len=few - 1) == few - 1
    assert contexts(2 * taken.beside_weights, 8, page_size=64) == 32_773, "of one in pages"
    with pytest.raises(ValueError, match=r"to spare\. Use fewer rows or a smaller max_model_len"):
        contexts(taken.beside_weights // 2, 8, max_model_len=32_773)
    with pytest.raises(ValueError, match=r"8 texts of 2176 tokens .* to spare\. Use fewer rows"):
        contexts(taken.beside_weights // 40, 8)
