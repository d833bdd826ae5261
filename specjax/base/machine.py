"""What the machine's processor is: programs and times of one may not be another's."""

import functools
import hashlib
import platform
from pathlib import Path

_LISTING = Path("/proc/cpuinfo")
_FEATURES = ("flags", "Features")


def cpu_model() -> str:
    """The processor's name, as the system gives it."""
    return _listed().get("model name") or platform.processor() or platform.machine()


@functools.cache
def cpu_digest() -> str:
    """A digest of the processor's name, family, model and instruction sets.

    Machines of one cloud may share a name and a home folder, not the instructions.
    """
    listed = _listed()
    features = next((listed[name] for name in _FEATURES if name in listed), "")
    more = [listed.get(name, "") for name in ("cpu family", "model", "CPU part")]
    parts = [platform.machine(), cpu_model(), *more, *sorted(features.split())]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:8]


def _listed() -> dict[str, str]:
    """What Linux lists of the first processor; nothing elsewhere."""
    try:
        first = _LISTING.read_text("utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
