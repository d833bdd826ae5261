"""What the stages of a run share: its recipe, its folder, and what earlier stages left there."""

import dataclasses
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from specjax.config import ModelConfig
from specjax.model import Model, initialize
from train.chunks import claim
from train.config import Collect, Evaluation, Recipe, Schedule
from train.data import Streams
from train.loop import Log, finished
from train.pretrain import tokenizer_and_streams


@dataclasses.dataclass(frozen=True)
class Work:
    """One run of a recipe in a folder. Properties are read once, when a stage needs them.

    They raise ValueError where the stage that makes them has not finished.
    """

    recipe: Recipe
    folder: Path
    log: Log

    @cached_property
    def corpus(self) -> tuple[Tokenizer, Streams]:
        """The tokenizer and the corpus as tokens."""
        return tokenizer_and_streams(self.recipe, self.folder, self.log)

    @property
    def streams(self) -> Streams:
        """The corpus as tokens."""
        return self.corpus[1]

    @property
    def collections(self) -> dict[str, Collect | Evaluation]:
        """What is collected, by the name of its folder."""
        return {"collected": self.recipe.collect, "heldout": self.recipe.evaluation}

    @cached_property
    def trained_target(self) -> Model:
        """The target as trained, in float32."""
        return self._finished("pretrain", "pretrain", self.recipe.target, self.recipe.pretrain)

    @cached_property
    def target(self) -> Model:
        """The target as it will be shipped: rounded to bfloat16, stored in float32."""
        rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16), self.trained_target)
        return jax.tree.map(lambda w: w.astype(jnp.float32), rounded)

    @cached_property
    def warm(self) -> Model:
        """What every draft starts from."""
        return self._finished("warm", "warm", self.recipe.draft, self.recipe.warm)

    @property
    def drafts(self) -> list[Model]:
        """The pool."""
        names = [f"drafts/{number}" for number in range(self.recipe.boost.drafts)]
        draft, schedule = self.recipe.draft, self.recipe.schedule
        return [self._finished("boost", name, draft, schedule) for name in names]

    def claimed(self, name: str, *settings: Any) -> Path:
        """The folder of a stage's result, refused where it was made with other settings."""
        claim(self.folder / name, *settings)
        return self.folder / name

    def _finished(self, stage: str, name: str, config: ModelConfig, schedule: Schedule) -> Model:
        model = initialize(jax.random.key(schedule.seed), config)
        return finished(stage, self.folder / name, model, schedule)
