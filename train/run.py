"""`python -m train.run CONFIG [group.field=value ...] --folder DIR`: every stage of a recipe.

Each stage leaves its result in the folder and resumes from what it finds there, so the same command
goes on after a kill. A result is found again by all that it was made from: recipes that share
stages can share a folder. On Linux the environment variable
`GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592`
makes training on a CPU about 1.6 times faster (huge pages, and memory kept between steps).
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from specjax.base.interrupts import CODE, ending_at_interrupts, if_interrupted, leave
from specjax.base.progress import reporting
from specjax.measure import plots
from specjax.methods.records import use_compilation_cache
from specjax.models.transformer import Model
from train import estimate, evaluate, heads, labels, trigrams
from train.boost import boost_filter, gather
from train.checks import check
from train.collect import collect, ended, has_all, load_collected, num_chunks
from train.config import Schedule, load_recipe
from train.distil import batches, distil, loss_of
from train.export import FOUND, check_place, export, report
from train.heldout import View, estimates, hold_out, view
from train.loop import Log, Metrics, steps_done
from train.loss import HARD
from train.marking import BY_NOTHING, verdict
from train.pretrain import pretrain
from train.report import machine, matmul_rate
from train.step import Loss
from train.work import Work


def run_tokenizer(work: Work) -> None:
    """The corpus is read, and the tokenizer trained where the target brings none."""
    streams = work.streams
    work.log.write(
        "corpus",
        documents=len(work.documents),
        **{name: sum(map(len, s.documents)) for name, s in streams._asdict().items()},
        bytes_per_token=streams.train.num_bytes / sum(map(len, streams.train.documents)),
    )


def run_pretrain(work: Work) -> None:
    """The target learns the corpus, unless one is given."""
    recipe = work.recipe
    if not isinstance(recipe.target, str):
        pretrain("pretrain", work.pretrained, recipe.target, recipe.pretrain, work.streams,
                 recipe.corpus.test_share, work.log)  # fmt: skip


def run_collect(work: Work) -> None:
    """The target continues prompts of the training split, and of the development split.

    Where it writes the prompts too, it does so first.
    """
    for name, settings in work.collections.items():
        folder = work.collected(name)
        if not has_all(folder, settings):
            stream = work.prompts(name)
            engine = likeliest = None
            if work.recipe.collect.rows:
                engine = work.engine
                likeliest = work.likeliest if name == "collected" else None
            collect("collect", folder, work.writer, stream, settings, work.log, engine, likeliest)
        share = ended(load_collected("collect", folder, settings))
        work.log.write("collect", where=folder.name, seconds=0.0, ended=share, note=_of_ends(share))


def _of_ends(share: float) -> str:
    if share:
        return f"{100 * share:.1f} % of the continuations ended by themselves."
    return "the target ended none of its continuations: the drafts learn nothing of where to end."


def run_label(work: Work) -> None:
    """The target's distributions along the collected rows and along corpus rows."""
    settings = work.recipe.labels
    collected, count = work.collected("collected"), num_chunks(work.recipe.collect)
    if not has_all(collected, work.recipe.collect):
        load_collected("collect", collected, work.recipe.collect)  # says what is missing
    found: list[tuple[Path, Callable[[int], labels.Texts], int]] = [
        (work.collected_labels, partial(labels.collected_texts, collected), count)
    ]
    if pieces := labels.corpus_pieces(settings):
        corpus = labels.corpus_texts(work.streams, work.recipe.corpus.test_share, settings)
        found.append((work.corpus_labels, corpus, len(pieces)))
    for folder, texts, chunks in found:
        labels.label(folder, work.target, texts, chunks, settings, work.log)
        if work.recipe.head.levels:
            heads.keep_hidden(
                work.hidden(folder), work.target, texts, chunks, work.layers_read, settings.tokens,
                work.log,
            )  # fmt: skip


def run_warm(work: Work) -> None:
    """Drafts learn the corpus: one for all members of its size, or one a member."""
    for member in range(work.recipe.boost.drafts):
        schedule, folder = work.warm_schedule(member), work.warmed(member)
        if folder not in [work.warmed(earlier) for earlier in range(member)]:
            pretrain(f"warm {member}", folder, work.draft_config(member), schedule,
                     work.draft_streams, work.recipe.corpus.test_share, work.log)  # fmt: skip


def _labelled(
    work: Work,
) -> tuple[labels.Labelled, Float[np.ndarray, "N T"], labels.Labelled]:
    """The collected rows' labels, the log probabilities of their tokens, and the corpus' labels.

    For heads with the target's hidden states.
    """
    recipe = work.recipe
    chunks, pieces = num_chunks(recipe.collect), labels.corpus_pieces(recipe.labels)
    collected, own = labels.load_labels(work.collected_labels, chunks)
    corpus = collected.of(slice(0))
    if pieces:
        corpus, _ = labels.load_labels(work.corpus_labels, len(pieces))
    if not recipe.head.levels:
        return collected, own, corpus
    collected = collected._replace(
        hidden=heads.load_hidden(work.hidden(work.collected_labels), chunks)
    )
    if pieces:
        found = heads.load_hidden(work.hidden(work.corpus_labels), len(pieces))
        corpus = corpus._replace(hidden=found)
    return collected, own, corpus


def run_boost(work: Work) -> None:
    """The pool is distilled, each draft on what the earlier ones miss."""
    recipe = work.recipe
    rows = load_collected("collect", work.collected("collected"), recipe.collect)
    development = load_collected("collect", work.collected("development"), recipe.evaluation)
    data = gather(rows, *_labelled(work), work.target)
    heldout, depth = hold_out(work.target, development), recipe.evaluation.depth
    pool, views = list[Model](), list[View]()
    for member in range(recipe.boost.drafts):
        schedule, taught, folder = work.draft_schedule(member), data, work.drafted(member)
        boosted = member and recipe.boost.rule != BY_NOTHING
        if boosted and steps_done(folder) < schedule.steps:
            taught, marked = boost_filter(data, pool, recipe.boost)
            work.log.write(
                "boost", where=folder.name, seconds=0.0, draft=member, rule=recipe.boost.rule,
                marked=marked, verdict=verdict(marked),
            )  # fmt: skip
        parts = [(taught.collected, schedule.batch), (taught.corpus, recipe.distil.corpus_rows)]

        def measure(model: Model) -> Metrics:
            own = view(work.whole(model), heldout.rows, work.target, depth)
            return estimates(heldout, own, views, depth)

        batch, loss = _lessons(work, parts, schedule)
        trained = distil(f"draft {member}", folder, work.warm(member), batch, schedule, loss,
                         measure, work.log, max(recipe.head.levels, 1))  # fmt: skip
        pool.append(work.whole(trained))
        if member + 1 < recipe.boost.drafts:  # the next one is measured beside it
            views.append(view(pool[-1], heldout.rows, work.target, depth))


def _lessons(
    work: Work, parts: list[tuple[labels.Labelled, int]], schedule: Schedule
) -> tuple[Callable[[int], Any], Loss]:
    """What a draft learns from in each step, and its loss."""
    name, head = work.recipe.distil.loss, work.recipe.head
    if not head.levels:
        return batches(parts, schedule.seed, work.rows), loss_of(name, schedule.dtype)
    if name == HARD:
        parts = [(heads.one_hot(part), count) for part, count in parts]
    batch = batches(parts, schedule.seed, work.rows)
    return heads.teaching(batch, work.target), heads.loss_of(name, schedule.dtype, head)


def run_trigrams(work: Work) -> None:
    """The target's trigrams are counted, if the recipe asks for it."""
    recipe = work.recipe
    if not recipe.trigrams.contexts or trigrams.is_made(work.counted):
        return
    rows = load_collected("collect", work.collected("collected"), recipe.collect)
    collected, _, corpus = _labelled(work)
    occurrences = trigrams.target_occurrences(rows, collected, corpus)
    size = work.target_config.vocab_size
    table = trigrams.make_trigrams(
        work.counted, occurrences, size, recipe.trigrams, recipe.name, work.log
    )
    development = load_collected("collect", work.collected("development"), recipe.evaluation)
    found = trigrams.agreement(table, work.target, development)
    work.log.write(trigrams.STAGE, where=work.counted.name, seconds=0.0, **found)


def run_evaluate(work: Work) -> None:
    """The tables of `train.evaluate` that the recipe asks for, beside the pair."""
    if not work.recipe.evaluation.tables:
        return
    asked, place = work.recipe.evaluation, work.pair / FOUND
    evaluate.run(
        evaluate.Options(
            model=str(work.pair),
            tables=",".join(asked.tables),
            max_new_tokens=asked.new_tokens,
            json=str(place),
            plot=str(place.with_suffix(".png")),
        )
    )
    work.log.write("evaluate", tables=",".join(asked.tables), folder=str(work.pair))


_WORTH_SAYING = 60.0
"""Seconds that are left at least where a line says so after a stage."""

STAGES = {
    "tokenizer": run_tokenizer,
    "pretrain": run_pretrain,
    "collect": run_collect,
    "label": run_label,
    trigrams.STAGE: run_trigrams,
    "warm": run_warm,
    "boost": run_boost,
    "export": export,
    "report": report,
    "evaluate": run_evaluate,
}


def main(arguments: list[str] | None = None) -> int:
    """Run a recipe's stages in order; each resumes from what `--folder` holds."""
    parser = argparse.ArgumentParser(prog="python -m train.run", description=main.__doc__)
    parser.add_argument("config", help="a file of configs/ that defines RECIPE")
    parser.add_argument(
        "overrides", nargs="*", metavar="group.field=value", help="or target=DIR, corpus=FILES..."
    )
    parser.add_argument("--folder", default="runs/default", help="checkpoints and log")
    parser.add_argument("--out", help="the finished pair (default: export in --folder)")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"some of {','.join(STAGES)}")
    options = parser.parse_intermixed_args(arguments)
    use_compilation_cache()
    try:
        with ending_at_interrupts("train.run"), reporting("run", "train.run"):
            _run(options)
    except KeyboardInterrupt:
        return CODE
    except (ValueError, OSError, ImportError) as error:
        print(f"train.run: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    """Runs the stages that are asked for.

    Raises:
      ValueError: something is refused; what can be is before anything is loaded or measured.
    """
    if_interrupted(lambda: "the same command goes on where it was")
    asked = _stages(options.stages)
    recipe, folder = load_recipe(options.config, tuple(options.overrides)), Path(options.folder)
    check(recipe)
    out = Path(options.out) if options.out else folder / "export"
    check_place(out)
    if "evaluate" in asked and recipe.evaluation.tables:
        plots.check(str(out / "tables.png"))
    work = Work(recipe, folder, Log(folder / "log.jsonl"), out)
    work.check()
    work.log.write("run", recipe=recipe.name, stages=",".join(asked), **_speed())
    left = estimate.tell(work, asked)
    for name in asked:
        left.begin()
        STAGES[name](work)
        if left.end(name) and left.seconds >= _WORTH_SAYING:
            estimate.say(f"after the stage {name} {left} are left.")


def _speed() -> Metrics:
    """What a run can hope for on this machine."""
    rates = {f"matmul_{kind}": matmul_rate(kind) / 1e9 for kind in ("float32", "bfloat16")}
    return {"device": machine()["device"], **rates, "unit": "GFLOP/s"}


def _stages(text: str) -> list[str]:
    """The named stages, in the order in which they run."""
    names = text.split(",")
    unknown = next((name for name in names if name not in STAGES), None)
    if unknown is not None:
        raise ValueError(f"there is no stage {unknown!r}; the stages are {', '.join(STAGES)}.")
    return [name for name in STAGES if name in names]


if __name__ == "__main__":
    leave(main())
