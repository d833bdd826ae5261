"""`python -m train.run CONFIG [group.field=value ...] --folder DIR`: every stage of a recipe.

Each stage leaves its result in the folder and resumes from what it finds there, so the same
command goes on after a kill. On Linux the environment variable
`GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592`
makes training on a CPU about 1.6 times faster (huge pages, and memory kept between steps).
"""

import argparse
import json
import sys
from pathlib import Path

from specjax.checkpoint import load_model, save_model
from train import labels
from train.boost import Material, boost
from train.chunks import write_text
from train.collect import collect, load_collected
from train.config import load_recipe
from train.heldout import hold_out
from train.loop import Log
from train.pretrain import bits_per_byte, pretrain
from train.report import machine, pool_figures, stage_seconds
from train.work import Work


def run_tokenizer(work: Work) -> None:
    """The corpus is read, and the tokenizer trained."""
    work.corpus  # noqa: B018


def run_pretrain(work: Work) -> None:
    """The target learns the corpus."""
    recipe = work.recipe
    pretrain("pretrain", work.folder / "pretrain", recipe.target, recipe.pretrain, work.streams,
             recipe.corpus.test_share, work.log)  # fmt: skip


def run_collect(work: Work) -> None:
    """The target continues prompts of the training split, and of the development split."""
    for name, stream in (("collected", work.streams.train), ("heldout", work.streams.dev)):
        settings = work.collections[name]
        folder = work.claimed(name, settings)
        collect("collect", folder, work.target, stream, settings, work.log)


def run_label(work: Work) -> None:
    """The target's laws along the collected rows and along corpus rows."""
    recipe = work.recipe
    rows = load_collected("collect", work.folder / "collected", recipe.collect)
    folder = work.claimed("labels/collected", recipe.labels, recipe.collect)
    labels.label_collected(folder, work.target, rows, recipe.labels, work.log)
    folder, share = work.claimed("labels/corpus", recipe.labels), recipe.corpus.test_share
    labels.label_corpus(folder, work.target, work.streams, share, recipe.labels, work.log)


def run_warm(work: Work) -> None:
    """One draft learns the corpus; every member of the pool starts from it."""
    recipe = work.recipe
    pretrain("warm", work.claimed("warm", recipe.warm, recipe.draft), recipe.draft, recipe.warm,
             work.streams, recipe.corpus.test_share, work.log)  # fmt: skip


def run_boost(work: Work) -> None:
    """The pool is distilled, each draft on what the earlier ones miss."""
    recipe = work.recipe
    work.claimed("drafts", recipe.schedule, recipe.distil, recipe.boost, recipe.labels)
    rows = load_collected("collect", work.folder / "collected", recipe.collect)
    heldout = load_collected("collect", work.folder / "heldout", recipe.evaluation)
    count, length = rows.tokens.shape
    of_corpus = recipe.labels.corpus_rows, recipe.labels.corpus_length
    material = Material(
        rows,
        labels.load_labels(work.folder / "labels/collected", count, length, recipe.labels),
        labels.load_labels(work.folder / "labels/corpus", *of_corpus, recipe.labels),
        hold_out(work.target, heldout),
    )
    boost(recipe, work.folder, work.warm, material, work.log)


def run_export(work: Work) -> None:
    """Target and drafts become Hugging Face folders, in bfloat16."""
    tokenizer, export = work.corpus[0], work.folder / "export"
    save_model(work.trained_target, export / "target", tokenizer)
    for number, draft in enumerate(work.drafts):
        save_model(draft, export / "drafts" / str(number), tokenizer)


def run_report(work: Work) -> None:
    """The figures of what was exported, in `report.json`."""
    recipe, export, held = work.recipe, work.folder / "export", work.streams.heldout
    folders = [export / "drafts" / str(n) for n in range(recipe.boost.drafts)]
    exported, drafts = load_model(export / "target"), [load_model(each) for each in folders]
    rows = load_collected("collect", work.folder / "heldout", recipe.evaluation)
    length = recipe.pretrain.length
    report = {
        "name": recipe.name,
        "target": {
            "parameters": recipe.target.num_parameters,
            "heldout_bits_per_byte": bits_per_byte(work.trained_target, held, length, 256),
            "exported_heldout_bits_per_byte": bits_per_byte(exported, held, length, 256),
            "exported_dev_bits_per_byte": bits_per_byte(exported, work.streams.dev, length, 256),
        },
        "draft_parameters": recipe.draft.num_parameters,
        "drafts": pool_figures(exported, drafts, rows, recipe.evaluation.depth),
        **json.loads((work.folder / "boost.json").read_text()),
        "stage_seconds": stage_seconds(work.log.file),
        "machine": machine(),
    }
    write_text(work.folder / "report.json", json.dumps(report, indent=1) + "\n")
    work.log.write("report", **report["target"], marked=str(report["marked"]))
    for number, figures in enumerate(report["drafts"]):
        work.log.write("report", draft=number, **figures)


STAGES = {
    "tokenizer": run_tokenizer,
    "pretrain": run_pretrain,
    "collect": run_collect,
    "label": run_label,
    "warm": run_warm,
    "boost": run_boost,
    "export": run_export,
    "report": run_report,
}


def main(arguments: list[str] | None = None) -> int:
    """Run a recipe's stages in order; each resumes from what `--folder` holds."""
    parser = argparse.ArgumentParser(prog="python -m train.run", description=main.__doc__)
    parser.add_argument("config", help="a file of configs/ that defines RECIPE")
    parser.add_argument("overrides", nargs="*", metavar="group.field=value")
    parser.add_argument("--folder", default="runs/default", help="checkpoints, log and result")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"some of {','.join(STAGES)}")
    options = parser.parse_args(arguments)
    try:
        asked = _stages(options.stages)
        recipe = load_recipe(options.config, tuple(options.overrides))
        work = Work(recipe, Path(options.folder), Log(Path(options.folder) / "log.jsonl"))
        work.log.write("run", stages=",".join(asked))
        for name in asked:
            STAGES[name](work)
    except ValueError as error:
        print(f"train.run: {error}", file=sys.stderr)
        return 2
    return 0


def _stages(text: str) -> list[str]:
    """The named stages, in the order in which they run."""
    names = text.split(",")
    unknown = next((name for name in names if name not in STAGES), None)
    if unknown is not None:
        raise ValueError(f"there is no stage {unknown!r}; the stages are {', '.join(STAGES)}.")
    return [name for name in STAGES if name in names]


if __name__ == "__main__":
    sys.exit(main())
