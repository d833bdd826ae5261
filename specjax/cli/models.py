"""`specjax models`: the models that have short names."""

import json
from typing import Any

from specjax.checkpoints.files import BUNDLED, WEIGHTS
from specjax.checkpoints.names import MODELS, Known, how_to_have, place_of, shipped_for
from specjax.cli.options import Models
from specjax.models.memory import readable


def models(options: Models) -> int:
    """Runs `specjax models`; gives the exit code."""
    found = [_bundled(), *map(_described, MODELS.values())]
    if options.json:
        print(json.dumps({"models": found}))
        return 0
    for each in found:
        print(f"{each['name']}: {each['what']}; {each['licence']}, {readable(each['bytes'])}")
        here = f"in {each['path']}, from" if each["path"] else "not here;"
        print(f"  {here} {each['from']}")
        if each["drafts"]:
            print(f"  drafts for it, in {each['drafts']}, from this package")
    return 0


def _bundled() -> dict[str, Any]:
    folder = BUNDLED / "target"
    return {
        "name": "bundled",
        "what": "a small model of Python code",
        "licence": "Apache-2.0",
        "bytes": sum(each.stat().st_size for each in folder.rglob(WEIGHTS)),
        "path": str(folder) if folder.is_dir() else None,
        "from": "this package",
        "drafts": _drafts("bundled"),
    }


def _described(known: Known) -> dict[str, Any]:
    place = place_of(known)
    return {
        "name": known.name,
        "what": known.what,
        "licence": known.licence,
        "bytes": known.size,
        "path": None if place is None else str(place.path),
        "from": f"{how_to_have(known)}, or the hub ({known.hub})" if place is None else place.what,
        "drafts": _drafts(known.name),
    }


def _drafts(name: str) -> str | None:
    """Where the drafts are that come with the package for a model, if any do."""
    shipped = shipped_for(name)
    return None if shipped is None else str(shipped / "drafts")
