"""The pieces of work that an accelerator is owed: a command each, in the order of their value.

Seconds are for one H100: measured where a piece has run there (`h100.json`), else estimates.
"""

from typing import NamedTuple

CALL_SECONDS = 540.0
"""Of one call; a piece may take less than that at most."""
_BEGIN_SECONDS = 60.0


class Piece(NamedTuple):
    """A command and what is known of it.

    Attributes:
      name: as `--only` takes it.
      command: a module and its arguments. {json} is the file it writes, {prompts} one with
        prompts of one compiled size, {seconds} the time it has.
      small: the arguments of a run that only shows that it works, on a CPU too.
      seconds: an estimate.
      most: it is ended after so long; one that goes on where it stopped then waits for the others.
      goes_on: the same command goes on with what its file says is `owed`.
      result: the name of its result, which pieces may share.
      platforms: where it runs; everywhere if there are none.
      needs: packages beside jax.
      env: of its process.
    """

    name: str
    command: tuple[str, ...]
    small: tuple[str, ...]
    seconds: float
    most: float
    goes_on: bool = False
    result: str = ""
    platforms: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        """The name of its result."""
        return self.result or self.name

    @property
    def fits_in(self) -> float:
        """The seconds that must be left for it to begin."""
        return min(self.seconds, _BEGIN_SECONDS) if self.goes_on else self.seconds


_PACKAGES = ("tyro", "transformers")
_NO_TRITON_PRODUCTS = (("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false"),)
"""Float32 programs compiled in 60 s without and in over 156 s with XLA's trials of them."""
_SMALL_COSTS = ("--shapes", "", "--inflate", "18.5M", "--parts", "costs", "--nodes", "1,2",
                "--slots", "32")  # fmt: skip
_SMALL_TEXTS = ("--shapes", "", "--inflate", "18.5M", "--parts", "generations", "--methods",
                "chain", "--temperatures", "0", "--limit", "1",
                "--max-new-tokens", "9")  # fmt: skip


def _kernels(name: str, seconds: float, platforms: tuple[str, ...] = ()) -> Piece:
    module = "benchmarks.accelerator.kernels"
    command = (module, name, "--json", "{json}")
    return Piece(f"kernels-{name}", command, (*command, "--limit", "3"), seconds, 300,
                 platforms=platforms)  # fmt: skip


def _attention(name: str, seconds: float, *flags: str, result: str = "attention") -> Piece:
    """Tree attention at some of the named shapes; what another piece has measured is not again."""
    module, ends = "pallas_kernels.bench", ("--json", "{json}", "--seconds", "{seconds}")
    bits = ("--bits", "8") if "8-bits" in name else ()
    small = ("--models", "bundled", "--batches", "1", "--nodes", "1", "--slots", "512", *bits)
    return Piece(f"attention-{name}", (module, *flags, *bits, "--patience", "90", *ends),
                 (module, *small, *ends), seconds, 420, goes_on=True, result=result)  # fmt: skip


def _roofline(name: str, seconds: float, most: float, small: tuple[str, ...], *flags: str) -> Piece:
    """`specjax roofline`, which measures the kernels that it needs; its memory is for torch too."""
    module = ("specjax", "roofline")
    ends = ("--json", "{json}", "--seconds", "1e9")
    return Piece(name, (*module, *flags, *ends), (*module, *small, *ends), seconds, most,
                 needs=_PACKAGES, env=(("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),))  # fmt: skip


def _pair(size: str, temperature: str, seconds: float) -> Piece:
    greedy = "greedy" if temperature == "0" else "sampled"
    return _roofline(
        f"pair-{size.lower()}-{greedy}", seconds, 400, _SMALL_TEXTS, "--shapes", "", "--inflate",
        size, "--parts", "generations", "--methods", "chain,specexec", "--temperatures",
        temperature, "--prompts", "{prompts}", "--limit", "4",
    )  # fmt: skip


def _verify(name: str, kernel: str, platforms: tuple[str, ...]) -> Piece:
    module = ("specjax", "verify", "--kernels", kernel, "--json", "--methods")
    return Piece(
        name, (*module, "chain,specexec", "--prompts", "4", "--samples", "1024"),
        (*module, "none", "--prompts", "1", "--max-new-tokens", "8", "--samples", "64"),
        130, 470, platforms=platforms, needs=_PACKAGES, env=_NO_TRITON_PRODUCTS,
    )  # fmt: skip


_MAIN = (
    "--models",
    "bundled,llama-3.2-1b,llama-3.1-8b",
    "--batches",
    "1",
    "--nodes",
    "1,16,64,256",
)
_BENCH = ("specjax", "bench", "--batch", "1", "--profile", "--prompts", "{prompts}", "--json",
          "{json}")  # fmt: skip
_OFFLOAD = ("benchmarks.offload.host", "{prompts}", "--json", "{json}")
_FIRST = ("specjax", "generate", "def fibonacci(n):", "--json", "--max-new-tokens", "64")
_TRACE = ("benchmarks.accelerator.trace",)
_PACKED = ("benchmarks.accelerator.packed", "--json", "{json}")
_LIMITS = ("benchmarks.sampling_limits", "--json", "{json}")
_PROGRAMS = ("benchmarks.programs.ahead", "here", "--json", "{json}")

PIECES = (
    _kernels("xla", 100),
    _kernels("prompts", 20),
    _kernels("hopper", 60, ("gpu",)),
    _kernels("triton", 50, ("gpu",)),
    _kernels("tpu", 60, ("tpu",)),
    _attention("4096", 240, *_MAIN, "--slots", "4096"),
    _attention("32768", 240, *_MAIN, "--slots", "32768"),
    _attention("8-bits", 90, *_MAIN[:4], "--nodes", "1,64", "--slots", "4096,32768",
               result="attention of 8 bits"),
    _attention("8-rows", 70, *_MAIN[:2], "--batches", "8", "--nodes", "1,64", "--slots", "4096"),
    _roofline("passes-8b", 75, 300, _SMALL_COSTS, "--shapes", "llama-3.1-8b", "--inflate", ""),
    _roofline("passes-1b", 70, 240, _SMALL_COSTS, "--shapes", "llama-3.2-1b", "--inflate", ""),
    _pair("1B", "0", 70),
    _pair("8B", "0", 100),
    Piece("trace", (*_TRACE, "--json", "{json}"),
          (*_TRACE, "--json", "{json}", "--shape", "llama-3.2-1b", "--layers", "1", "--nodes", "8",
           "--slots", "32"), 60, 180),
    Piece("packed", _PACKED, (*_PACKED, "--shape", "llama-3.2-1b", "--columns", "1"), 40, 180,
          needs=("tyro",)),
    Piece("limits", _LIMITS, (*_LIMITS, "--small"), 90, 240),
    Piece("shares", (*_BENCH, "--inflate", "1B", "--methods", "chain,specexec", "--temperatures",
                     "0.8", "--limit", "2", "--dtype", "bfloat16"),
          (*_BENCH, "--inflate", "18.5M", "--methods", "chain", "--temperatures", "0", "--limit",
           "1", "--max-new-tokens", "8", "--dtype", "float32", "--skip-phases"),
          180, 400, needs=_PACKAGES),
    Piece("offload", (*_OFFLOAD, "--parameters", "2B", "--budgets", "63", "255", "--columns", "1",
                      "64", "256", "--new", "64"),
          (*_OFFLOAD, "--parameters", "18.5M", "--budgets", "7", "--columns", "1", "--new", "8"),
          150, 330, needs=_PACKAGES),
    _verify("verify-triton", "triton", ("gpu",)),
    _verify("verify-xla", "xla", ()),
    Piece("first-start", _FIRST, _FIRST, 40, 240, needs=_PACKAGES,
          env=(("SPECJAX_CACHE", "empty"), ("JAX_ENABLE_COMPILATION_CACHE", "false"))),
    Piece("compile", (*_PROGRAMS, "--models", "llama-3.2-1b", "llama-3.1-8b", "--methods", "none",
                      "chain", "specexec"),
          (*_PROGRAMS, "--models", "llama-3.2-1b", "--methods", "none", "--parts", "step",
           "--prompt", "64"),
          180, 400, needs=_PACKAGES, env=(("JAX_ENABLE_COMPILATION_CACHE", "false"),)),
    _pair("1B", "0.8", 110),
    _pair("8B", "0.8", 80),
    _attention("rest", 400),
)  # fmt: skip
"""All of them; sampled texts and the other shapes are what is left out if time is short."""
