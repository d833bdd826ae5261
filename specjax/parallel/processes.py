"""Devices that a command asks for: a mesh of them, and several processes that share one."""

import math
import os
import sys
import threading
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from specjax.parallel.mesh import AXES, make_mesh

COORDINATOR = "SPECJAX_COORDINATOR"
PROCESSES = "SPECJAX_PROCESSES"
PROCESS = "SPECJAX_PROCESS"
PATIENCE = "SPECJAX_PATIENCE"
"""Seconds to wait for the other processes, and until one that says nothing is given up; 60."""


def sizes_of(text: str | None) -> dict[str, int]:
    """The axes that `--mesh` names, such as data=2,model=4.

    Raises:
      ValueError: an axis is unknown or named twice, or has no size.
    """
    found: dict[str, int] = {}
    for item in (text or "").split(",") if text is not None else ():
        name, _, size = (part.strip() for part in item.partition("="))
        if name not in AXES or name in found or not size.isdecimal() or not int(size):
            raise ValueError(
                f"--mesh is {text!r}; it must be axes among {', '.join(AXES)}, each once "
                "and with a size, such as data=2,model=4."
            )
        found[name] = int(size)
    return found


def processes_of(text: str | None, environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Coordinator, number of processes and this one's own that `--distributed` names.

    "auto" takes them from the environment; None is left to what jax finds out by itself.

    Raises:
      ValueError: they are not HOST:PORT, a number, and a smaller one.
    """
    if text == "auto":
        given = [environment.get(name, "") for name in (COORDINATOR, PROCESSES, PROCESS)]
        if not any(given):
            return None
        text = ",".join(given)
    parts = [part.strip() for part in (text or "").split(",")]
    numbers = [int(part) for part in parts[1:] if part.isdecimal()]
    if len(parts) != 3 or len(numbers) != 2 or ":" not in parts[0] or numbers[1] >= numbers[0]:
        raise ValueError(
            f"--distributed is {text!r}; it must be HOST:PORT,PROCESSES,PROCESS with the last from "
            f"0 on, or auto with {COORDINATOR}, {PROCESSES} and {PROCESS} set or on a cluster that "
            "jax knows."
        )
    return parts[0], numbers[0], numbers[1]


def devices_for(mesh: str | None, distributed: str | None = None) -> Mesh | None:
    """The mesh that `--mesh` names, of all processes that `--distributed` brings together.

    Nothing of jax may have run before. On a CPU there are as many devices as the mesh needs.

    Raises:
      ValueError: an option is wrong, the coordinator does not answer, or devices are too few.
    """
    sizes = sizes_of(mesh)
    place = None if distributed is None else processes_of(distributed, os.environ)
    needed = math.prod(sizes.values())
    chosen = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if sizes and not chosen:
        jax.config.update("jax_num_cpu_devices", -(-needed // (place[1] if place else 1)))
    if distributed is not None:
        if not sizes:
            raise ValueError("--distributed needs --mesh, which says what the processes share.")
        _join(place)
    if not sizes:
        return None
    made = make_mesh(**sizes)
    taking_part = {device.process_index for device in made.devices.flat}
    if len(taking_part) < jax.process_count():
        raise ValueError(
            f"--mesh {mesh} has devices of {len(taking_part)} processes; there are "
            f"{jax.process_count()}, and each must have some."
        )
    return made


def _join(place: tuple[str, int, int] | None) -> None:
    """Joins the other processes, of which one prints its answer.

    A process that times out ends with a sentence: what jax does then is to abort.

    Raises:
      ValueError: the address or the processes' numbers cannot be.
    """
    coordinator, count, own = place or (None, None, None)
    which = "this process" if own is None else f"process {own} of {count}"
    where = "the coordinator" if coordinator is None else f"the coordinator at {coordinator}"
    seconds = patience(os.environ)

    def give_up() -> None:
        missing = "the other processes" if own == 0 else where
        message = f"specjax: {which} timed out after {seconds} s of waiting for {missing}."
        print(message, file=sys.stderr, flush=True)
        os._exit(2)

    watch = threading.Timer(seconds, give_up)
    watch.daemon = True
    watch.start()
    try:
        jax.distributed.initialize(
            coordinator, count, own,
            initialization_timeout=2 * seconds, heartbeat_timeout_seconds=seconds,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(
            f"--distributed is auto, {COORDINATOR}, {PROCESSES} and {PROCESS} are not set, and jax "
            f"knows no cluster here: {error}"
        ) from error
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise ValueError(f"{which} could not join {where}: {first}") from error
    finally:
        watch.cancel()
    _answer_alone()


def patience(environment: Mapping[str, str]) -> int:
    """Seconds to wait for other processes.

    Raises:
      ValueError: the environment names no number.
    """
    text = environment.get(PATIENCE, "60")
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{PATIENCE} is {text!r}; it must be a number of seconds.")
    return int(text)


def _answer_alone() -> None:
    """Leaves standard output to Python, and of several processes to the first.

    The libraries below jax print there when processes connect.
    """
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    if jax.process_index() > 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), own)
    sys.stdout = os.fdopen(own, "w")
