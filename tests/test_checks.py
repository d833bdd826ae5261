"""What is checked of requests before the engine takes them."""

import dataclasses

import numpy as np
import pytest

from specjax.engine import checks
from specjax.engine.checks import check_request, check_requests
from specjax.engine.request import Request
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
    found = check_requests(requests, config, 256)
    assert all(each is own for each, own in zip(counted, [requests[0], *others], strict=True))
    for request, (own, parameters) in zip(requests, found, strict=True):
        assert own.prompt == tuple(request.prompt)
        assert own.stop_token_ids == tuple(request.stop_token_ids)
        assert (own.choice, own.seed, own.temperature) == (
            request.choice, request.seed, request.temperature
        )  # fmt: skip
        wanted = check_request(request, config, 256)
        assert all(map(np.array_equal, parameters, wanted))
    with pytest.raises(ValueError, match=r"choice is -1; it must lie in \[0, 2147483647\]"):
        check_requests([one, dataclasses.replace(one, choice=-1)], config, 256)
