"""The finished pair: Hugging Face folders, prompts to measure it on, and a report of the run."""

import json
import shutil
from pathlib import Path
from typing import Any

from specjax.checkpoints.acceptance import write_acceptance
from specjax.checkpoints.feature_drafts import is_feature_draft, load_feature_draft
from specjax.checkpoints.files import Files
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.load import load_draft, load_model
from specjax.checkpoints.ngram_files import load_ngram
from specjax.checkpoints.pair import Pair
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.methods import defaults
from specjax.methods.drafted import acceptance_of
from specjax.models.transformer import Model
from train.chunks import write_text
from train.collect import load_collected
from train.data import Prompts, evenly
from train.heldout import View, estimates, hold_out, view
from train.loop import Metrics
from train.pretrain import bits_per_byte
from train.report import losses, machine, marked, stage_seconds
from train.target import lasting_name
from train.trigrams import made_in
from train.work import Work

PAIR = "pair.json"
"""What an export was made from; and its target, where that existed before."""

DEVELOPMENT, HELDOUT = "dev.jsonl", "heldout.jsonl"
"""Prompts that go with a pair: to choose trees on, and to measure on."""

FOUND = "tables.json"
"""What `train.evaluate` found out about a pair at the end of its run, with a picture."""

REPORT = "report.json"
"""The figures of the run that made a pair."""

NGRAM = "ngram"
"""The trigram model of what the target says, where the recipe asks for one."""

OWN = {"target", "drafts", NGRAM, PAIR, DEVELOPMENT, HELDOUT, REPORT, FOUND, "tables.png"}
"""What an export consists of, finished or half written; nothing else is ever replaced."""

PROMPTS = 64
"""Prompts of the development and of the held-out split that go with a pair."""


def check_place(out: Path) -> None:
    """Checks that nothing but an earlier export would be replaced.

    Raises:
      ValueError: `out` holds something else.
    """
    if out.is_file():
        raise ValueError(f"{out} is a file; the finished pair is a folder.")
    names = [each.name for each in out.iterdir()] if out.is_dir() else []
    foreign = [name for name in names if name.removesuffix(".part") not in OWN]
    if foreign:
        raise ValueError(
            f"{out} holds {min(foreign)}, which is no part of an export; choose another --out."
        )


def export(work: Work) -> None:
    """Writes `work.pair`: `target` (a trained one), `drafts/N`, `ngram`, and prompts as lines.

    Weights are in bfloat16. An earlier export of something else is replaced, with its tables; one
    of the same results stays as it is.
    """
    out, made_from = work.pair, _made_from(work)
    if (out / PAIR).is_file() and (out / PAIR).read_text() == made_from:
        return
    part, old = (out.with_name(f".{out.name}.{end}") for end in ("new", "old"))
    shutil.rmtree(part, ignore_errors=True)
    if not isinstance(work.recipe.target, str):
        save_model(work.trained_target, part / "target", tokenizer=work.tokenizer)
    for number in range(work.recipe.boost.drafts):
        save_model(work.draft(number), part / "drafts" / str(number), tokenizer=work.tokenizer)
    if work.recipe.trigrams.contexts:
        shutil.copytree(made_in(work.counted), part / NGRAM)
    write_text(part / PAIR, made_from)
    for name in (DEVELOPMENT, HELDOUT):
        split = Path(name).stem
        lines = [
            json.dumps({"id": f"{split}/{number}", "prompt": text})
            for number, text in enumerate(_prompts(work, split))
        ]
        write_text(part / name, "\n".join(lines) + "\n")
    if out.exists():
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
    part.rename(out)
    shutil.rmtree(old, ignore_errors=True)
    work.log.write("export", folder=str(out))


def _made_from(work: Work) -> str:
    """`pair.json`: the names of the results that the pair is made from, and a given target."""
    own, asked = work.recipe.target, work.recipe.evaluation
    drafts = [work.drafted(number).name for number in range(work.recipe.boost.drafts)]
    found: dict[str, Any] = {
        "made_from": {"target": work.target_id, "drafts": drafts, "corpus": work.corpus_id},
        "prompts": {"prompt_tokens": asked.prompt_tokens, "seed": asked.seed},
    }
    if work.recipe.trigrams.contexts:
        found["made_from"]["trigrams"] = work.counted.name
    if isinstance(own, str):
        found["target"] = lasting_name(own, work.files)
    return json.dumps(found, indent=1) + "\n"


def _prompts(work: Work, split: str) -> list[str]:
    """`PROMPTS` prompts of a split, as evenly over its documents as they give.

    Those of a chat are its texts, without the chat template around them.
    """
    asked = work.recipe.evaluation
    if work.recipe.turns.tokens:
        return work.turns.texts(split, PROMPTS)
    if work.recipe.collect.chat:
        return list(work.messages(split, asked.prompt_tokens))[:PROMPTS]
    stream = getattr(work.streams, split)
    if stream.prompts:
        given = Prompts(stream, asked.prompt_tokens, asked.seed)
        chosen = [given.at(index) for index in range(min(PROMPTS, len(stream.prompts)))]
    else:
        chosen = evenly(stream, asked.prompt_tokens, PROMPTS, asked.seed)
    return [work.tokenizer.decode(ids, skip_special_tokens=True) for ids in chosen]


def report(work: Work) -> None:
    """The run's figures as `report.json`: what was made, from what, how long it took."""
    recipe, places, out = work.recipe, _places(work), work.pair
    if (out / REPORT).is_file():  # a new export has none
        return
    drafts = [_exported(work, number) for number in range(recipe.boost.drafts)]
    rows = load_collected("collect", work.collected("development"), recipe.evaluation)
    heldout, views, figures = hold_out(work.target, rows), list[View](), list[Metrics]()
    for draft in drafts:
        own = view(draft, rows, work.target, recipe.evaluation.depth)
        figures.append(estimates(heldout, own, views, recipe.evaluation.depth))
        views.append(own)
    found = {
        "name": recipe.name,
        "target": _of_target(work),
        "drafts": [
            {"parameters": draft.config.num_parameters, "where": work.drafted(n).name, **numbers}
            for n, (draft, numbers) in enumerate(zip(drafts, figures, strict=True))
        ],
        "rule": recipe.boost.rule,
        "losses": losses(work.log.file, places),
        "marked": marked(work.log.file, [work.drafted(n).name for n in range(len(drafts))]),
        "stage_seconds": stage_seconds(work.log.file, places),
        "machine": machine(),
    }
    write_text(out / REPORT, json.dumps(found, indent=1) + "\n")
    if work.target.config.num_parameters >= defaults.LEAST_WEIGHED:
        table = out / NGRAM if work.recipe.trigrams.contexts else None
        tell_acceptance(work.target, out / "drafts" / "0", table)
    work.log.write("report", **found["target"], marked=str(found["marked"]))
    for number, numbers in enumerate(figures):
        work.log.write("report", draft=number, **numbers)


def _exported(work: Work, number: int) -> Model:
    """A member of the pool as exported."""
    folder = work.pair / "drafts" / str(number)
    if work.recipe.head.levels:
        return load_feature_draft(Files(folder), work.target)
    return load_model(folder)


def tell_acceptance(target: Model, draft: Path, table: Path | None = None) -> None:
    """Writes into the folders of a draft and of an n-gram model what they give.

    So `auto` need not measure it.
    """
    files = Files(draft)
    model = load_feature_draft(files, target) if is_feature_draft(files) else load_draft(files)
    pair = Pair(target, tokenizer_of(draft, target.config.vocab_size), [model])
    told = {"chain": draft}
    if table is not None:
        told["ngram"] = table
        pair = pair._replace(table=load_ngram(table))
    for method, folder in told.items():
        found = acceptance_of(pair, method)
        if found is not None:
            write_acceptance(folder, found)


def _of_target(work: Work) -> Metrics:
    """The target's size, and its bits a byte on texts that it was not trained on."""
    own, streams = work.recipe.target, work.streams
    if isinstance(own, str):
        return {"folder": own, "parameters": work.target.config.num_parameters}
    length, exported = work.recipe.pretrain.length, load_model(work.pair / "target")
    return {
        "parameters": own.num_parameters,
        "heldout_bits_per_byte": bits_per_byte(work.trained_target, streams.heldout, length, 256),
        "exported_heldout_bits_per_byte": bits_per_byte(exported, streams.heldout, length, 256),
        "exported_dev_bits_per_byte": bits_per_byte(exported, streams.dev, length, 256),
    }


def _places(work: Work) -> list[str]:
    """The names of all results that the pair was made from."""
    drafts = range(work.recipe.boost.drafts)
    found = [work.collected(name) for name in work.collections]
    found += [work.collected_labels, work.corpus_labels]
    found += [place(n) for n in drafts for place in (work.warmed, work.drafted)]
    if not isinstance(work.recipe.target, str):
        found.append(work.pretrained)
    return sorted({place.name for place in found})
