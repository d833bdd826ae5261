"""The pair that comes with the package: its tokens are those of plain decoding."""

import pytest

from specjax import certify, methods, prompts
from specjax.options import Verify

GREEDY = certify.greedy_part, Verify(methods="chain,pool", max_new_tokens=32)
NAIVE = certify.naive_part, Verify(methods="chain", max_new_tokens=32)


@pytest.fixture(scope="module")
def pair() -> methods.Pair:
    return methods.load_pair("bundled", None, "float32")


@pytest.fixture(scope="module")
def chosen(pair) -> list[prompts.Prompt]:
    listed = prompts.read(None)[:3]
    return prompts.fitting(listed, pair.tokenizer, pair.target.config.max_positions, 32)[0]


@pytest.mark.parametrize(("part", "options"), [GREEDY, NAIVE], ids=["greedy", "naive"])
def test_tokens_are_those_of_plain_decoding(part, options, pair, chosen, capsys):
    """But for what rounding explains: counted, printed, and at most one row of each method."""
    found = part(pair, chosen, options)
    with capsys.disabled():
        print(f"\n{part.__name__}: {found['divergences']} divergences in {found['tokens']} tokens")
    assert found["passed"]
    assert found["tokens"] == 32 * len(chosen)
    for method in found["methods"]:
        assert len(method["divergences"]) <= 1
        assert method["tokens_per_step"] > 1.2
