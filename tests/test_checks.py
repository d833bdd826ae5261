"""What is checked of requests before the engine takes them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.engine import checks
from specjax.engine.checks import check_request, check_requests
from specjax.engine.programs import packed, unpacked
from specjax.engine.request import Request, RequestError
from specjax.verify.rules import GREEDY, NAIVE
from tests.pairs import tiny_model


def test_choices_of_a_prompt_are_checked_once(monkeypatch):
    config = tiny_model().config
    one = Request(prompt=[3, 4], temperature=0.7, seed=5, logit_bias={3: 1.0}, stop_token_ids=[2])
    others = [
        Request(prompt=[3, 4]),
        Request(prompt=one.prompt, temperature=0.7, seed=6),
        Request(prompt=one.prompt, temperature=0.9, seed=6),
        Request(prompt=one.prompt, temperature=0.9, seed=6, stop_token_ids=[2, 3]),
    ]
    requests = [dataclasses.replace(one, choice=choice) for choice in (0, 1, 2)] + others
    counted: list[Request] = []

    def counting(request, *rest):
        counted.append(request)
        return check_request(request, *rest)

    monkeypatch.setattr(checks, "check_request", counting)
    found = check_requests(requests, config, 256, NAIVE)
    assert all(each is own for each, own in zip(counted, [requests[0], *others], strict=True))
    for request, (own, parameters) in zip(requests, found, strict=True):
        assert own.prompt == tuple(request.prompt)
        assert own.stop_token_ids == tuple(request.stop_token_ids)
        assert (own.choice, own.seed, own.temperature) == (
            request.choice, request.seed, request.temperature
        )  # fmt: skip
        wanted = check_request(request, config, 256)
        assert all(map(np.array_equal, jax.tree.leaves(parameters), jax.tree.leaves(wanted)))
    with pytest.raises(ValueError, match=r"choice is -1; it must lie in \[0, 2147483647\]"):
        check_requests([one, dataclasses.replace(one, choice=-1)], config, 256, NAIVE)


WRONG = {
    "prompt": [[], [64], [-1], [1] * 300],
    "max_new_tokens": [0, 2**31],
    "temperature": [-1.0, float("nan"), 1e-50],
    "top_k": [-1],
    "top_p": [0.0, 1.1],
    "min_p": [-0.1],
    "presence_penalty": [101.0],
    "frequency_penalty": [-101.0],
    "repetition_penalty": [0.0],
    "logit_bias": [{64: 1.0}, {1: 101.0}],
    "seed": [2**64],
    "choice": [-1],
    "stop_token_ids": [[64], [1] * 17],
    "logprobs": [21],
    "prompt_logprobs": [-1],
    "max_tpot_ms": [0.0, 1e10],
}


@pytest.mark.parametrize("field", WRONG)
def test_a_refusal_names_the_field(field):
    config = tiny_model().config
    for value in WRONG[field]:
        asked = Request(**({"prompt": [1]} | {field: value}))
        with pytest.raises(RequestError) as refused:
            check_requests([asked], config, 256, NAIVE)
        assert refused.value.field == field


def test_every_field_that_has_a_range_is_refused_outside_of_it():
    every = {field.name for field in dataclasses.fields(Request)}
    assert every - {*WRONG} == {"ignore_eos", "has_stop_strings", "grammar"}


def test_a_rule_for_greedy_requests_refuses_others_without_a_seed():
    config = tiny_model().config
    sampled = Request(prompt=[1], temperature=0.5)
    for request in (Request(prompt=[1]), dataclasses.replace(sampled, seed=1)):
        check_requests([request], config, 256, GREEDY)
    with pytest.raises(RequestError, match="this engine's rule, greedy, needs 0") as refused:
        check_requests([sampled], config, 256, GREEDY)
    assert refused.value.field == "temperature"


def test_parameters_are_what_their_words_say():
    config = tiny_model().config
    for request in (
        Request(prompt=[1]),
        Request(
            prompt=[1], temperature=0.7, top_k=5, seed=2**63 + 5, choice=3, presence_penalty=1.0
        ),
        Request(prompt=[1], top_p=0.5, min_p=0.1, logit_bias={2: 1.0}, stop_token_ids=[3, 4]),
    ):
        parameters = check_request(request, config, 256)
        found = unpacked(jnp.asarray(packed(parameters)), parameters)
        assert jax.tree.structure(found) == jax.tree.structure(parameters)
        for one, other in zip(*map(jax.tree.leaves, (found, parameters)), strict=True):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)
