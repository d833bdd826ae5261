"""Digests of the tokens of 20 fixed cases, to compare two versions of specjax on one machine.

    python -m tests.fixed_tokens

Each case is a seed, a method, a rule and a temperature, on the bundled pair. Only public names are
used, so that the script runs with an earlier version, too: copy it there. Equal versions of jax on
one machine give equal lines.
"""

import hashlib

import jax

import specjax

TEXTS = ("def fibonacci(n):", "class Stack:\n    def push(self, item):", "import os\n")
CASES = (
    *((seed, "none", "auto", t) for seed, t in ((0, 0.0), (1, 0.8))),
    *((2, name, "auto", 0.0) for name in ("chain", "tree", "pool", "specexec", "hybrid")),
    *((3, name, "auto", 0.8) for name in ("chain", "tree", "pool", "specexec", "lookup")),
    *((4, "tree", rule, 0.8) for rule in ("naive", "multi-step", "recursive", "traversal")),
    *((5, "chain", rule, 1.0) for rule in ("block", "one-hot")),
    (6, "staged", "auto", 0.6),
    (7, "recycle", "naive", 0.9),
)


def main() -> None:
    """Prints a line a case."""
    pair = specjax.load_pair("bundled", None, dtype="float32")
    prompts = [pair.tokenizer(text).input_ids for text in TEXTS]
    for seed, method, rule, temperature in CASES:
        drafter = specjax.build(specjax.setting_of(method), pair, verify=rule)
        made = specjax.generate(
            jax.random.key(seed), pair.target, drafter, prompts, max_new_tokens=32,
            sampling=specjax.Sampling(temperature), verify=rule if drafter else "auto",
            stop_at_eos=False,
        )  # fmt: skip
        digest = hashlib.sha256(made.tokens.tobytes() + made.steps.tobytes()).hexdigest()[:16]
        print(seed, method, rule, temperature, digest, made.steps.tolist(), flush=True)


if __name__ == "__main__":
    main()
