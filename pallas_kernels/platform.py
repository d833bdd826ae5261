"""What a program is traced for: the default backend, or a device that is not here.

Forms differ by platform: how a cache is written, which kernels run, what dtype it has. Which it is
follows from the context of the trace, so that a program can be compiled ahead of time for another
platform, and is the one that runs there.
"""

import contextlib
import re
from collections.abc import Iterator

import jax
from jax.sharding import AbstractDevice, AbstractMesh, get_abstract_mesh, use_abstract_mesh

DEVICES = {
    "v5e": AbstractDevice("TPU v5 lite", 1, "tpu"),
    "v6e": AbstractDevice("TPU v6 lite", 1, "tpu"),
    "h100": AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu"),
}
"""Devices that programs are compiled for ahead of time, as JAX calls them."""
_CAPABILITIES = {DEVICES["h100"].device_kind: (9, 0)}


def platform() -> str:
    """The platform that is traced for: "cpu", "gpu" or "tpu"."""
    device = _named()
    return jax.default_backend() if device is None else device.platform


def device_kind() -> str:
    """The kind of device that is traced for."""
    device = _named()
    return jax.devices()[0].device_kind if device is None else device.device_kind


def at_hand() -> bool:
    """Whether what is traced for is the default backend."""
    device = _named()
    return device is None or device.platform == jax.default_backend()


def compute_capability() -> tuple[int, int] | None:
    """Of an NVIDIA GPU that is traced for, such as `(9, 0)`; None of anything else."""
    if platform() != "gpu":
        return None
    if not at_hand():
        return _CAPABILITIES.get(device_kind())
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(jax.devices()[0], "compute_capability", "")))
    return None if found is None else (int(found[1]), int(found[2]))


@contextlib.contextmanager
def traced_for(device: AbstractDevice) -> Iterator[None]:
    """Traces for a device of `DEVICES`; what is compiled here otherwise is kept apart."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


def _named() -> AbstractDevice | None:
    return getattr(get_abstract_mesh(), "abstract_device", None)
