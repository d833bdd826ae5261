"""`specjax models`: the models that have short names."""

import json
from typing import Any

from specjax.checkpoints.files import BUNDLED, WEIGHTS
from specjax.checkpoints.names import MODELS, Known, how_to_have, place_of
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
    return 0


def _bundled() -> dict[str, Any]:
    folder = BUNDLED / "target"
    return {
        "name": "bundled",
        "what": "a small model of Python code, with its drafts",
        "licence": "Apache-2.0",
        "bytes": sum(each.stat().st_size for each in BUNDLED.rglob(WEIGHTS)),
        "path": str(folder) if folder.is_dir() else None,
        "from": "this package",
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
    }
