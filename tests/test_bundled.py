"""The pair that comes with the package: its tokens are those of plain decoding."""

import jax
import pytest

from specjax.checkpoints.files import BUNDLED
from specjax.checkpoints.load import load_model
from specjax.checkpoints.pair import Pair, load_pair
from specjax.cli.options import Verify
from specjax.cli.verify import checks_of, settings_of
from specjax.decoding.generate import generate
from specjax.draft import ExpansionDrafter
from specjax.measure import certificate, prompts

pytestmark = pytest.mark.slow
GREEDY = certificate.greedy_part, Verify(methods="chain,pool", max_new_tokens=32)
NAIVE = certificate.naive_part, Verify(methods="chain", max_new_tokens=32)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("bundled", None, dtype="float32")


@pytest.fixture(scope="module")
def chosen(pair) -> list[prompts.Prompt]:
    listed = prompts.read(None)[:3]
    return prompts.fitting(listed, pair.tokenizer, pair.target.config.max_positions, 32)[0]


@pytest.mark.parametrize(("part", "options"), [GREEDY, NAIVE], ids=["greedy", "naive"])
def test_tokens_are_those_of_plain_decoding(part, options, pair, chosen, capsys):
    """But for what rounding explains: counted, printed, and at most one row of each method."""
    found = part(pair, settings_of(options, pair), chosen, checks_of(options))
    with capsys.disabled():
        differing = sum(len(one.divergences) for one in found.comparisons)
        print(f"\n{part.__name__}: {differing} divergences in {found.tokens} tokens")
    assert found.passed
    assert found.tokens == 32 * len(chosen)
    for method in found.comparisons:
        assert len(method.divergences) <= 1
        assert method.tokens_per_step > 1.2


def test_the_second_stage_drafts_for_the_first_draft(pair, chosen):
    """The smaller draft's chains are worth a few tokens to draft 0, which stays as it is."""
    draft, small = pair.drafts[0], load_model(BUNDLED / "stage2")
    assert small.config.vocab_size == draft.config.vocab_size
    assert 3 * small.config.num_parameters < 1.1 * draft.config.num_parameters
    key, texts = jax.random.key(0), [prompt.tokens for prompt in chosen]
    plain = generate(key, draft, None, texts, max_new_tokens=32)
    chain = ExpansionDrafter.of([small], (1,) * 4)
    staged = generate(key, draft, chain, texts, max_new_tokens=32)
    assert (staged.tokens == plain.tokens).mean() > 0.9  # a near tie may turn the rest of a row
    assert staged.tokens_per_step.mean() > 2.5
