"""Deliberate defects, and whether `pytest` catches each of them.

    python -m tests.defects                 # the tests named beside each defect; 25 minutes
    python -m tests.defects --only SEED --only COPY
    python -m tests.defects --all           # every quick test until one fails; hours

Each defect is a small change of one file in a copy of the working tree. The tests named beside it
run there until one fails; slow ones are left out, so that what `pytest` proves is enough. Run it
after tests were removed or joined. It exits with 1 if a defect is not caught, and with 2 if the
text that it changes is not there exactly once: then the defect has to be written anew.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Defect(NamedTuple):
    """A change of a file, and the tests that are to catch it.

    Attributes:
      about: what is wrong then.
      file: the file, below the root.
      right: its text, which is there once.
      wrong: the text in its place.
      tests: files of `tests/` without `test_` and `.py`, or parts of them as pytest names them.
    """

    about: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


DEFECTS = {
    "RATIO": Defect(
        "a child is accepted with p, not p / q",
        "specjax/verify/token_wise.py",
        "accept = jnp.minimum(1, probs[token] / q[token])",
        "accept = jnp.minimum(1, probs[token])",
        ("token_wise", "rules"),
    ),
    "RESIDUAL": Defect(
        "the residual distribution is not normalised for the next sibling",
        "specjax/verify/token_wise.py",
        "return Trial(accept, norm(jnp.maximum(probs - q, 0), probs)[0])",
        "return Trial(accept, jnp.maximum(probs - q, 0))",
        ("output_distribution", "rules"),
    ),
    "SIBLINGS": Defect(
        "traversal visits siblings from the last one",
        "specjax/verify/traversal.py",
        "return left.any(), jnp.argmax(left).astype(jnp.int32)",
        "return left.any(), (left.size - 1 - jnp.argmax(left[::-1])).astype(jnp.int32)",
        ("token_wise", "rules"),
    ),
    "REPLACEMENT": Defect(
        "draws without replacement are tried as if with it",
        "specjax/verify/token_wise.py",
        'left, _ = norm(tree.q[row].at[tokens].set(0, mode="drop"), own)',
        "left, _ = norm(tree.q[row], own)",
        ("token_wise", "rules"),
    ),
    "BLOCK": Defect(
        "block verification forgets the weight of the path so far",
        "specjax/verify/block.py",
        "weight = jnp.minimum(1, reached[-1] * above / below)",
        "weight = jnp.minimum(1, above / below)",
        ("token_wise", "rules"),
    ),
    "NOISE": Defect(
        "the naive rule draws with the same noise at every position",
        "specjax/verify/rules.py",
        "fold(key, position + 1 + depth, Purpose.TOKEN)",
        "fold(key, 1 + depth, Purpose.TOKEN)",
        ("token_wise", "decode"),
    ),
    "PARENT": Defect(
        "a node below a merged one hangs below another",
        "specjax/trees/tree.py",
        "parent = jnp.where(at_root, 0, node[draws.parents])",
        "parent = jnp.where(at_root, 0, draws.parents + 1)",
        ("tree", "output_distribution"),
    ),
    "MASK": Defect(
        "a node sees its near ancestors alone",
        "specjax/trees/tree.py",
        "return seen, jnp.take_along_axis(above, above, -1)",
        "return seen, above",
        ("tree", "transformer"),
    ),
    "DEPTH": Defect(
        "the columns of a tree's pass stand one position too far",
        "specjax/decoding/stepping.py",
        "return Columns(tokens, state.cache.length[:, None] + depth, state.cache, tree_mask)",
        "depth = depth + (depth > 1)\n"
        "    return Columns(tokens, state.cache.length[:, None] + depth, state.cache, tree_mask)",
        ("decode",),
    ),
    "COMPACTION": Defect(
        "values of accepted nodes are kept in order, not along the path",
        "specjax/models/kv_cache.py",
        "value = jnp.take_along_axis(value, at, axis=-2)",
        "value = value[..., : path.shape[1], :]",
        ("transformer", "decode"),
    ),
    "COPY": Defect(
        "the last part of a copied row is left out",
        "specjax/engine/state.py",
        "lax.fori_loop(first // size, -(-length // size), chunk, held)",
        "lax.fori_loop(first // size, length // size, chunk, held)",
        ("engine",),
    ),
    "PAGES": Defect(
        "a row shares the page in which what it takes over ends",
        "specjax/engine/pages.py",
        "self._target.of_row[source][: (common - 1) // self._size]",
        "self._target.of_row[source][: -(-(common - 1) // self._size)]",
        ("pages",),
    ),
    "PACKING": Defect(
        "packed columns begin with the second node",
        "specjax/models/packing.py",
        "place = (before <= jnp.arange(width)[:, None]).sum(axis=1, dtype=jnp.int32)",
        "place = (before <= jnp.arange(1, width + 1)[:, None]).sum(axis=1, dtype=jnp.int32)",
        ("engine",),
    ),
    "PENALTY": Defect(
        "a node's own path is not counted",
        "specjax/base/penalties.py",
        "made = made.at[row, node, tokens[:, None]].add(path.astype(jnp.int32))",
        "made = made.at[row, node, tokens[:, None]].add(0 * path.astype(jnp.int32))",
        ("penalties",),
    ),
    "SEED": Defect(
        "every request draws with one key",
        "specjax/engine/programs.py",
        'seeded = jax.random.wrap_key_data(parameters.key[0], impl="threefry2x32")',
        'seeded = jax.random.wrap_key_data(0 * parameters.key[0], impl="threefry2x32")',
        ("engine",),
    ),
    "CANCELLED": Defect(
        "the row of a cancelled request stays taken",
        "specjax/engine/scheduler.py",
        "        if row is not None:\n            self.free(row)\n        return row is not None",
        "        return row is not None",
        ("scheduler",),
    ),
    "SCALE": Defect(
        "all groups of a packed row have the first one's scale",
        "specjax/models/quantized.py",
        "numbers = self._numbers(codes) * _wide(self.scale)",
        "numbers = self._numbers(codes) * _wide(self.scale[:, :1])",
        ("quantized",),
    ),
    "SHAPE": Defect(
        "an annotation says another shape than there is",
        "specjax/trees/budget.py",
        ') -> Float[Array, "B N"]:\n    """How likely each node',
        ') -> Float[Array, "N B"]:\n    """How likely each node',
        ("switching",),
    ),
    "ZERO": Defect(
        "zeros of the first version of GPTQ are taken as they are stored",
        "specjax/checkpoints/layouts.py",
        "zero = zero + np.uint8(1)",
        "zero = zero + np.uint8(0)",
        ("quantized",),
    ),
    "STREAMING": Defect(
        "a streamed layer attends to the values of the first one",
        "specjax/decoding/streamed.py",
        "held = cache.keys[index], cache.values[index], cache.length",
        "held = cache.keys[index], cache.values[0], cache.length",
        ("streaming",),
    ),
    "GROWTH": Defect(
        "a child's score forgets its parent's",
        "specjax/draft/growth.py",
        "child = score + jnp.log(growth.decay) + log_q",
        "child = jnp.log(growth.decay) + log_q",
        ("growth",),
    ),
    "HIDDEN": Defect(
        "hidden states come in the order of layers, not of the drafter's wish",
        "specjax/models/transformer.py",
        "hidden = tuple(states[number] for number in hidden_layers)",
        "hidden = tuple(states[number] for number in sorted(hidden_layers))",
        ("hidden_states",),
    ),
    "TOP_K": Defect(
        "top-k keeps a token more",
        "specjax/base/sampling.py",
        "k = jnp.where(wide.top_k > 0, jnp.minimum(wide.top_k, vocabulary), vocabulary)",
        "k = jnp.where(wide.top_k > 0, jnp.minimum(wide.top_k + 1, vocabulary), vocabulary)",
        ("sampling",),
    ),
    "TOP_P": Defect(
        "top-p is a share of the likeliest token, not of all",
        "specjax/base/sampling.py",
        "share = wide.top_p * mass.sum(axis=-1, keepdims=True)",
        "share = wide.top_p * mass.max(axis=-1, keepdims=True)",
        ("sampling",),
    ),
    "MIN_P": Defect(
        "min-p is a probability, not a share of the likeliest token's",
        "specjax/base/sampling.py",
        "p = jnp.where(p >= wide.min_p, p, 0)",
        "p = jnp.where(p >= wide.min_p * p.sum(axis=-1, keepdims=True), p, 0)",
        ("sampling",),
    ),
}


def faults(root: Path = ROOT) -> list[str]:
    """A sentence for each defect whose text is not in its file exactly once."""
    found = []
    for name, defect in DEFECTS.items():
        file = root / defect.file
        count = file.read_text(encoding="utf-8").count(defect.right) if file.is_file() else 0
        if count != 1:
            found.append(f"{name}: {defect.right!r} is in {defect.file} {count} times, not once.")
    return found


def copy_of_tree(folder: Path) -> None:
    """Copies what git knows or would add, and the products in C++, which it ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    products = (str(each.relative_to(ROOT)) for each in ROOT.glob("pallas_kernels/**/*.so"))
    for name in (*filter(None, listed.split("\0")), *products):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def caught_by(defect: Defect, folder: Path, everything: bool) -> str | None:
    """The first test that fails in a copy of the tree with a defect; None if none does.

    Raises:
      RuntimeError: pytest could not run the tests.
    """
    file = folder / defect.file
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole.replace(defect.right, defect.wrong), encoding="utf-8")
    asked = [] if everything else ["-n", "0", *map(_path_of, defect.tests)]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *asked]
    kept = {"JAX_COMPILATION_CACHE_DIR": str(folder / ".programs")}  # most are those without it
    try:
        done = subprocess.run(
            command, cwd=folder, env=kept | os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
    finally:
        file.write_text(whole, encoding="utf-8")
    if done.returncode == 0:
        return None
    first = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - |$)", done.stdout, re.MULTILINE)
    if first is None:
        raise RuntimeError(f"pytest ran no test:\n{done.stdout[-4000:]}")
    return first[1]


def _path_of(test: str) -> str:
    name, *rest = test.split("::")
    return "::".join([f"tests/test_{name}.py", *rest])


def main() -> int:
    """Prints a line a defect."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", choices=DEFECTS, help="a defect; may come again")
    parser.add_argument("--all", action="store_true", help="run every quick test, not those named")
    options = parser.parse_args()
    if found := faults():
        print(*found, sep="\n")
        return 2
    missed = []
    with tempfile.TemporaryDirectory(prefix="specjax-defects-") as name:
        folder = Path(name)
        copy_of_tree(folder)
        for defect in options.only or DEFECTS:
            start = time.perf_counter()
            test = caught_by(DEFECTS[defect], folder, options.all)
            seconds = time.perf_counter() - start
            missed += [defect] * (test is None)
            print(f"{defect:12}{seconds:5.0f} s  {test or 'NOT CAUGHT'}", flush=True)
    print(f"{len(options.only or DEFECTS) - len(missed)} caught, {len(missed)} not.")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
