"""One of two processes with half of the rows each: `python -m tests.on_processes HOST:PORT OWN`."""

import json
import sys

import jax
import numpy as np

from specjax.base.sampling import Sampling
from specjax.decoding.generate import generate, stream
from specjax.draft import ExpansionDrafter
from specjax.parallel.mesh import make_mesh, settled
from tests.conftest import tiny_model

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
ASKED = {"max_new_tokens": 10, "stop_at_eos": False}


def main(address: str, own: int) -> None:
    jax.distributed.initialize(address, 2, own)
    mesh = make_mesh(data=2)
    model, key = tiny_model(), jax.random.key(0)
    sampling = Sampling(temperature=np.float32([0, 0.8, 0, 1.2]))
    drafter = ExpansionDrafter.of([model], (1, 1))
    found = {"alone": generate(key, model, drafter, PROMPTS, sampling=sampling, **ASKED)}
    target, drafts = settled((model, drafter), mesh)
    found["made"] = generate(key, target, drafts, PROMPTS, sampling=sampling, **ASKED)
    streamed = [[] for _ in PROMPTS]
    for step in stream(key, target, drafts, PROMPTS, sampling=sampling, **ASKED):
        for row, tokens in enumerate(streamed):
            tokens.extend(step.tokens[row, : step.count[row]].tolist())
    told = {name: made.tokens.tolist() for name, made in found.items()}
    print(json.dumps(told | {"streamed": streamed}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
