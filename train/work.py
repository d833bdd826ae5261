"""What the stages of a run share: the recipe, and where each stage's result lies.

A result's folder is named after a digest of everything that it depends on: settings, corpus, and
the results it was made from. So what was made with other settings is never taken for what is
asked, and recipes that share a stage share its result.
"""

import dataclasses
import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from specjax.base.pytree import replace
from specjax.checkpoints.files import Files, find
from specjax.checkpoints.huggingface import read_config
from specjax.checkpoints.load import load
from specjax.checkpoints.tokenizers import tokenizer_of
from specjax.models.config import ModelConfig
from specjax.models.quantized import in_dtype, widened
from specjax.models.transformer import Model, initialize
from train import heads
from train.checks import check_for
from train.chunks import write_text
from train.collect import Keep, load_collected, num_chunks
from train.config import Collect, Evaluation, Recipe, Schedule
from train.corpus import read_corpus, train_tokenizer
from train.data import Stream, Streams, encode
from train.documents import Document, fingerprint
from train.labels import label_as_collected
from train.loop import Log, finished
from train.marking import BY_NOTHING
from train.served import EngineRows
from train.target import identity_of
from train.turns import WrittenTurns, prompt_of
from train.vocabulary import Rows, in_training, most_frequent

COSMETIC = ("save_every", "evaluate_every", "depth", "tables")
"""Settings that change no result."""
_SPLIT_OF = {"collected": "train", "development": "dev"}


@dataclasses.dataclass(frozen=True)
class Work:
    """One run of a recipe in a folder. Properties are read once, when a stage needs them.

    `pair` is where the finished pair goes. Properties raise ValueError where the stage that makes
    them has not finished.
    """

    recipe: Recipe
    folder: Path
    log: Log
    pair: Path

    def place(self, stage: str, *inputs: Any) -> Path:
        """The folder of a stage's result, made from `inputs`; they are noted in it."""
        text = json.dumps([_plain(each) for each in inputs], indent=1, sort_keys=True) + "\n"
        folder = self.folder / f"{stage}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        if not (folder / "inputs.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / "inputs.json", text)
        return folder

    def check(self) -> None:
        """Checks the corpus and a given target's configuration and tokenizer, before its weights
        are read or anything is measured.

        Raises:
          ValueError: a file of the corpus is none, a setting does not go with the target, or its
            tokenizer does not fit it.
        """
        read = self.documents
        assert read
        if isinstance(self.recipe.target, str):
            config = self.read_config()
            check_for(self.recipe, config)
            identity_of(self.files)
            self._check_tokenizer(len(tokenizer_of(self.files.path)), config, self.recipe.target)
            self._check_ends(config)

    def read_config(self) -> ModelConfig:
        """The configuration of a given target, of which no weights are read."""
        return read_config(self.files.path)[0]

    def _check_tokenizer(self, size: int, target: ModelConfig, where: object) -> None:
        if size > target.vocab_size:
            raise ValueError(
                f"the tokenizer in {where} has {size} tokens, the target's vocabulary is "
                f"{target.vocab_size}."
            )

    def _check_ends(self, target: ModelConfig) -> None:
        if not target.eos_ids:
            raise ValueError(
                f"{self.recipe.target} names no end token, so its texts would never end; add "
                "eos_token_id to its config.json or generation_config.json."
            )

    @cached_property
    def documents(self) -> list[Document]:
        """The corpus."""
        return read_corpus(self.recipe.corpus, (self.folder, self.pair))

    @cached_property
    def corpus_id(self) -> str:
        """A digest of the corpus' texts."""
        return fingerprint(self.documents)

    @cached_property
    def files(self) -> Files:
        """The target that the recipe names, on this machine."""
        assert isinstance(self.recipe.target, str)
        return find(self.recipe.target)

    @cached_property
    def given(self) -> tuple[Model, Any]:
        """The target that the recipe names, and its tokenizer."""
        model, tokenizer = load(self.files.path)
        check_for(self.recipe, model.config)
        return widened(model), tokenizer

    @cached_property
    def target_config(self) -> ModelConfig:
        """The target's shape."""
        own = self.recipe.target
        if not isinstance(own, str):
            return own
        return self.given[0].config

    @cached_property
    def target_id(self) -> str:
        """What names the target among the inputs of other stages."""
        if isinstance(self.recipe.target, str):
            return identity_of(self.files)
        return self.pretrained.name

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer: trained on the corpus, or the given target's own.

        Raises:
          ValueError: it has more tokens than the target.
        """
        vocabulary = self.target_config.vocab_size
        if isinstance(self.recipe.target, str):
            found = self.given[1]
            size, where = len(found), self.recipe.target
        else:
            where = self.place("tokenizer", self.corpus_id, vocabulary)
            file = where / "tokenizer.json"
            if not file.is_file():
                texts = [d.text for d in self.documents if d.split == "train" and not d.is_test]
                write_text(file, train_tokenizer(texts, vocabulary).to_str())
            found = Tokenizer.from_file(str(file))
            size = found.get_vocab_size()
        self._check_tokenizer(size, self.target_config, where)
        return found

    @cached_property
    def streams(self) -> Streams:
        """The corpus as tokens."""
        tokenizer, eos_ids = self.tokenizer, self.target_config.eos_ids
        self._check_ends(self.target_config)
        if isinstance(tokenizer, Tokenizer):
            return encode(self.documents, lambda texts: _encoded(tokenizer, texts), eos_ids[0])
        return encode(
            self.documents,
            lambda texts: tokenizer(texts, add_special_tokens=False, verbose=False).input_ids,
            eos_ids[0],
            [token for token in tokenizer("").input_ids if token not in eos_ids],
        )

    @property
    def collections(self) -> dict[str, Collect | Evaluation]:
        """What is collected, by the name of its stage's result."""
        return {"collected": self.recipe.collect, "development": self.recipe.evaluation}

    @property
    def pretrained(self) -> Path:
        """Where the target is trained."""
        recipe = self.recipe
        return self.place(
            "pretrain", self.corpus_id, recipe.target, recipe.pretrain, recipe.corpus.test_share
        )

    @property
    def turned(self) -> Path:
        """Where the turns lie that the target writes."""
        recipe = self.recipe
        return self.place("turns", self.target_id, recipe.turns, recipe.collect.dtype)

    @cached_property
    def turns(self) -> WrittenTurns:
        """The turns that the target writes."""
        recipe, config = self.recipe, self.target_config
        longest = min(each.prompt_tokens for each in self.collections.values())
        return WrittenTurns(
            self.turned, self.tokenizer, recipe.turns, config.eos_ids, recipe.corpus.slices, longest
        )

    def prompts(self, name: str) -> Stream:
        """What is continued for one of `collections`.

        Raises:
          ValueError: the target cannot write turns (see `WrittenTurns.of`).
        """
        split = _SPLIT_OF[name]
        settings = self.collections[name]
        if self.recipe.collect.chat:
            return Stream((), 0, tuple(self.messages(split, settings.prompt_tokens).values()))
        if not self.recipe.turns.tokens:
            return getattr(self.streams, split)
        count = num_chunks(settings) * settings.batch
        return self.turns.of(split, count, lambda: self.engine, self.log)

    def messages(self, split: str, most: int) -> dict[str, np.ndarray]:
        """The corpus' prompts of a split that are messages of at most `most` tokens in the target's
        chat template, and these tokens.

        Raises:
          ValueError: there is none, or no fitting chat template.
        """
        texts = [each.text for each in self.documents if each.is_prompt and each.split == split]
        found = {text: np.array(prompt_of(self.tokenizer, text), np.int32) for text in texts}
        chosen = {text: tokens for text, tokens in found.items() if len(tokens) <= most}
        if not chosen:
            raise ValueError(
                f"of the {len(texts)} prompts of the corpus for {split} none has at most {most} "
                "tokens in the target's chat template; collect.chat=True needs some."
            )
        return chosen

    @cached_property
    def writer(self) -> Model:
        """The target as it writes what is collected."""
        return in_dtype(self.target, jnp.dtype(self.recipe.collect.dtype))

    @cached_property
    def engine(self) -> EngineRows:
        """The engine in whose `collect.rows` texts are collected."""
        lengths = [each.prompt_tokens + each.new_tokens for each in self.collections.values()]
        return EngineRows(self.writer, self.recipe.collect.rows, max(lengths))

    def collected(self, name: str) -> Path:
        """Where one of `collections` lies, however many prompts it has."""
        recipe = self.recipe
        settings = dataclasses.replace(self.collections[name], prompts=0)
        prompts = self.turned.name if recipe.turns.tokens else self.corpus_id
        prompts = f"messages of {prompts}" if recipe.collect.chat else prompts
        return self.place(
            name, self.target_id, prompts, settings, recipe.corpus.slices, recipe.collect.dtype,
            recipe.collect.rows > 0,
        )  # fmt: skip

    @property
    def collected_labels(self) -> Path:
        """Where the target's distributions along its own text lie, however much there is of it."""
        return self.place("labels", self.collected("collected").name, self.recipe.labels)

    @property
    def likeliest(self) -> Keep | None:
        """What labels rows while they are collected."""
        return label_as_collected(
            self.collected_labels, self.target_config.vocab_size, self.recipe.labels
        )

    @property
    def corpus_labels(self) -> Path:
        """Where the target's distributions along corpus rows lie."""
        share = self.recipe.corpus.test_share
        return self.place(
            "corpus_labels", self.target_id, self.corpus_id, self.recipe.labels, share
        )

    @property
    def labelled(self) -> list[Any]:
        """What names everything that drafts learn from among the inputs of other stages."""
        count = num_chunks(self.recipe.collect) * self.recipe.collect.batch
        return [self.collected_labels.name, count, self.corpus_labels.name]

    @property
    def counted(self) -> Path:
        """Where the trigram model of what the target says lies."""
        return self.place("trigrams", self.labelled, self.recipe.trigrams)

    def warmed(self, member: int) -> Path:
        """Where a member's start is trained on the corpus."""
        config = self.draft_config(member)
        share = self.recipe.corpus.test_share
        tokens = self.target_id if isinstance(self.recipe.target, str) else "own tokenizer"
        known = self.labelled[:2] if self.recipe.vocabulary.size else []
        return self.place(
            "warm", self.corpus_id, tokens, config, self.warm_schedule(member), share, *known
        )

    def drafted(self, member: int) -> Path:
        """Where a member of the pool is distilled."""
        recipe, boost = self.recipe, self.recipe.boost
        taught = None
        if member and boost.rule != BY_NOTHING:
            rule = dataclasses.replace(boost, drafts=0, own_start=False, sizes=())
            taught = [_plain(rule), self.drafted(member - 1).name]
        read = [recipe.head, self.layers_read] if recipe.head.levels else []
        read += [identity_of(recipe.started_from)] if recipe.head.start else []
        return self.place(
            "draft", self.labelled, self.warmed(member).name, self.draft_schedule(member),
            recipe.distil, taught, *read,
        )  # fmt: skip

    def draft_config(self, member: int) -> ModelConfig:
        """The shape of a member of the pool while it is trained."""
        whole = self.recipe.config_of(member, self.target_config)
        size = self.recipe.vocabulary.size
        if self.recipe.head.levels:
            return heads.in_training(whole)
        return in_training(whole, size) if size else whole

    @property
    def layers_read(self) -> tuple[int, ...]:
        """The target's hidden states that heads read."""
        return self.recipe.layers_read(self.target_config)

    def hidden(self, labels: Path) -> Path:
        """Where the target's hidden states lie along rows that are labelled in a folder."""
        return self.place("hidden", labels.name, self.layers_read)

    @cached_property
    def started(self) -> tuple[Model, np.ndarray | None]:
        """The head to fine-tune, in training, and the tokens that it knows (see
        `heads.started`).
        """
        return heads.started(self.recipe.started_from, self.target)

    @cached_property
    def rows(self) -> Rows | None:
        """The rows of the tokens that the drafts know; None where they know all of them."""
        size, vocabulary = self.recipe.vocabulary.size, self.target_config.vocab_size
        if self.recipe.head.start:
            _, known = self.started
            return None if known is None else Rows(known, vocabulary)
        if not size:
            return None
        settings = self.recipe.collect
        collected = load_collected("collect", self.collected("collected"), settings)
        return Rows(most_frequent(collected, size, vocabulary), vocabulary)

    @cached_property
    def draft_streams(self) -> Streams:
        """The corpus as rows of the drafts in training."""
        rows, streams = self.rows, self.streams
        if rows is None:
            return streams
        return Streams(
            *(each._replace(documents=tuple(map(rows.tokens, each.documents))) for each in streams)
        )

    def whole(self, draft: Model) -> Model:
        """A draft in training as one of its target's tokens."""
        if self.recipe.head.levels:
            head = heads.beside(draft, self.target.embedding)
            rows = None if self.rows is None else jnp.asarray(self.rows.row_of)
            return replace(head, row_of=rows)
        return draft if self.rows is None else self.rows.whole(draft)

    def warm_schedule(self, member: int) -> Any:
        """How a member's start is trained; all have the same, or each its own seed."""
        seed = self.recipe.warm.seed + (10 * member if self.recipe.boost.own_start else 0)
        return dataclasses.replace(self.recipe.warm, seed=seed)

    def draft_schedule(self, member: int) -> Schedule:
        """How a member is distilled; each has a seed of its own."""
        schedule = self.recipe.schedule
        return dataclasses.replace(schedule, seed=schedule.seed + 10 * member)

    @cached_property
    def trained_target(self) -> Model:
        """The target as trained, in float32."""
        own = self.recipe.target
        assert isinstance(own, ModelConfig)
        return _finished("pretrain", self.pretrained, own, self.recipe.pretrain)

    @cached_property
    def target(self) -> Model:
        """The target as it will be used: as loaded; or rounded to bfloat16, stored in float32."""
        if isinstance(self.recipe.target, str):
            return self.given[0]
        rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16), self.trained_target)
        return jax.tree.map(lambda w: w.astype(jnp.float32), rounded)

    def warm(self, member: int) -> Model:
        """What a member starts from, in training."""
        schedule, head = self.warm_schedule(member), self.recipe.head
        if head.start:
            return self.started[0]
        first = _finished("warm", self.warmed(member), self.draft_config(member), schedule)
        if not (head.levels and head.from_target):
            return first
        return heads.begun(first, self.target, None if self.rows is None else self.rows.ids)

    def draft(self, member: int) -> Model:
        """A member of the pool."""
        schedule, config = self.draft_schedule(member), self.draft_config(member)
        return self.whole(_finished("boost", self.drafted(member), config, schedule))


def _finished(stage: str, folder: Path, config: ModelConfig, schedule: Schedule) -> Model:
    model = initialize(jax.random.key(schedule.seed), config)
    return finished(stage, folder, model, schedule)


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [found.ids for found in tokenizer.encode_batch(texts, add_special_tokens=False)]


_FIRST = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
          "num_kv_heads", "head_dim", "rope_theta", "norm_eps", "tie_embeddings", "max_positions",
          "eos_ids")  # fmt: skip
"""What a model's configuration had when runs were first finished; the rest then had its default."""


def _plain(value: Any) -> Any:
    """Settings as what JSON holds, without those that change no result."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = dataclasses.asdict(value)
        fields = dataclasses.fields(value) if isinstance(value, ModelConfig) else ()
        later = {field.name: field.default for field in fields if field.name not in _FIRST}
        left_out = {name for name in later if getattr(value, name) == later[name]}.union(COSMETIC)
        return {name: found[name] for name in found if name not in left_out}
    return value
