"""One of two processes with half of the rows each: `python -m tests.on_processes HOST:PORT OWN`."""

import json
import sys

import jax
import numpy as np

from specjax import decode, sharding
from specjax.draft import ExpansionDrafter
from specjax.sampling import Sampling
from tests.conftest import tiny_model

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
ASKED = {"max_new_tokens": 10, "stop_at_eos": False}


def main(address: str, own: int) -> None:
    jax.distributed.initialize(address, 2, own)
    mesh = sharding.make_mesh(data=2)
    model, key = tiny_model(), jax.random.key(0)
    sampling = Sampling(temperature=np.float32([0, 0.8, 0, 1.2]))
    drafter = ExpansionDrafter.of([model], (1, 1))
    found = {"alone": decode.generate(key, model, drafter, PROMPTS, sampling=sampling, **ASKED)}
    target, drafts = sharding.settled((model, drafter), mesh)
    found["made"] = decode.generate(key, target, drafts, PROMPTS, sampling=sampling, **ASKED)
    streamed = [[] for _ in PROMPTS]
    for step in decode.stream(key, target, drafts, PROMPTS, sampling=sampling, **ASKED):
        for row, tokens in enumerate(streamed):
            tokens.extend(step.tokens[row, : step.count[row]].tolist())
    told = {name: made.tokens.tolist() for name, made in found.items()}
    print(json.dumps(told | {"streamed": streamed}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
