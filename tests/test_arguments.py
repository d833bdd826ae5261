"""What `generate` and `stream` say of wrong arguments, as users call them: without type checks."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base.sampling import Sampling
from tests.pairs import generate, varied_model

ROOT = Path(__file__).parent.parent
SCRIPT = """
import json
import jax, jax.numpy as jnp, numpy as np
from specjax import Sampling, generate, stream
from tests.pairs import near, varied_model

model, key, nan = varied_model(), jax.random.key(0), float("nan")
good = {"key": key, "target": model, "drafter": None, "prompts": [[1, 2]], "max_new_tokens": 3}
found = {}
for text in json.loads(CASES):
    asked = good | eval(text)
    for call in (generate, stream):
        try:
            call(asked.pop("key"), asked.pop("target"), asked.pop("drafter"), asked.pop("prompts"),
                 **asked)
            said = "nothing"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        asked = good | eval(text)
        found.setdefault(text, []).append(said)
print(json.dumps(found))
"""
CASES = {
    "dict(key=7)": "TypeError: key is 7; it must be a JAX PRNG key, such as jax.random.key(0).",
    "dict(key=None)": "TypeError: key is None; it must be a JAX PRNG key",
    "dict(key=jnp.zeros(2))": "TypeError: key is an array of float32 with shape (2,)",
    "dict(key=jnp.zeros(3, jnp.uint32))": "TypeError: key is an array of uint32 with shape (3,)",
    "dict(key=jnp.zeros(2, jnp.int32))": "TypeError: key is an array of int32 with shape (2,)",
    "dict(key=jax.random.split(key, 3))": "ValueError: key has shape (3,), for 1 prompts",
    "dict(key=jax.random.split(key, (1, 2)))": "ValueError: key has shape (1, 2), for 1 prompts",
    "dict(prompts=[1, 2])": "TypeError: prompt 0 is 1, not a list of token ids",
    "dict(prompts=np.array([1, 2]))": "ValueError: prompts has shape (2,); an array of prompts",
    "dict(prompts='def f')": "TypeError: prompts is text, 'def f'; it must be a list of prompts",
    "dict(prompts=['def f'])": "TypeError: prompt 0 is text, 'def f'; it must be a list of token",
    "dict(prompts=3)": "TypeError: prompts is a int; it must be a list of prompts",
    "dict(prompts=[[1.0, 2.0]])": "TypeError: prompt 0 holds 1.0; token ids are integers.",
    "dict(prompts=[[1], [True]])": "TypeError: prompt 1 holds True; token ids are integers.",
    "dict(prompts=[[1], [None]])": "TypeError: prompt 1 holds None; token ids are integers.",
    "dict(prompts=np.ones((1, 2)))": "TypeError: prompt 0 is an array of float64 with shape (2,)",
    "dict(prompts=jnp.ones((1, 2), bool))": "TypeError: prompt 0 is an array of bool with shape",
    "dict(prompts=np.ones((1, 2, 2), int))": "ValueError: prompts has shape (1, 2, 2)",
    "dict(prompts=[])": "ValueError: there is no prompt.",
    "dict(prompts=np.zeros((0, 4), int))": "ValueError: there is no prompt.",
    "dict(prompts=np.zeros((1, 0), int))": "ValueError: prompt 0 is empty",
    "dict(prompts=[[1, 99]])": "ValueError: prompt 0 holds token 99; the vocabulary has 64.",
    "dict(max_new_tokens=2.5)": "TypeError: max_new_tokens is 2.5; it must be an integer.",
    "dict(max_new_tokens=True)": "TypeError: max_new_tokens is True; it must be an integer.",
    "dict(max_new_tokens=0)": "ValueError: max_new_tokens is 0; it must be at least 1.",
    "dict(sampling=Sampling(top_k=2.5))": "TypeError: sampling.top_k is 2.5; it must be integers",
    "dict(sampling=Sampling(top_k=-1))": "ValueError: sampling.top_k is -1; it must lie in [0, ",
    "dict(sampling=Sampling('1'))": "TypeError: sampling.temperature is '1'; it must be numbers.",
    "dict(sampling=Sampling(None))": "TypeError: sampling.temperature is None; it must be numbers",
    "dict(sampling=Sampling(True))": "TypeError: sampling.temperature is True; it must be numbers",
    "dict(sampling=Sampling(1e-46))": "ValueError: sampling.temperature is 1e-46; a float32 holds",
    "dict(sampling=Sampling(1e39))": "ValueError: sampling.temperature is 1e+39; a float32 holds",
    "dict(sampling=Sampling(nan))": "ValueError: sampling.temperature is nan; it must lie in",
    "dict(sampling=Sampling(np.ones(2)))": "ValueError: sampling.temperature has shape (2,); there",
    "dict(sampling=0.8)": "TypeError: sampling is a float; it must be a Sampling: such as",
    "dict(verify=3)": "TypeError: verify is a int; it must be a str",
    "dict(verify='best')": "ValueError: no verification rule 'best'; there are auto,",
    "dict(target=(model, None))": "TypeError: target is a tuple; it must be a Model: load",
    "dict(drafter=near(model, 1))": "TypeError: drafter is a Model; it must be a Drafter",
    "dict(drafter=[near(model, 1)])": "TypeError: drafter is a list; it must be a Drafter",
}


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    """What every case gets from `generate`, and from `stream` as it is called."""
    code = SCRIPT.replace("CASES", repr(json.dumps(list(CASES))))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_argument_is_named(case, said):
    for sentence in said[case]:
        assert sentence.startswith(CASES[case])


@pytest.mark.parametrize(
    "prompts",
    [
        np.array([[5, 9, 2], [3, 4, 5]]),
        np.array([[5, 9, 2], [3, 4, 5]], np.uint8),
        jnp.array([[5, 9, 2], [3, 4, 5]]),
        [np.array([5, 9, 2]), np.array([3, 4, 5])],
        [list(np.array([5, 9, 2])), (3, 4, 5)],
        [jnp.array([5, 9, 2]), jnp.array([3, 4, 5])],
    ],
    ids=["numpy", "bytes", "jax", "a list of numpy's", "numbers of numpy's", "a list of jax's"],
)
def test_arrays_are_prompts(prompts):
    target, sampling = varied_model(), Sampling(0.7)
    got = generate(target, None, prompts, sampling=sampling)
    expected = generate(target, None, [[5, 9, 2], [3, 4, 5]], sampling=sampling)
    np.testing.assert_array_equal(got.tokens, expected.tokens)


def test_words_of_a_key_are_a_key():
    target, sampling, key = varied_model(), Sampling(0.7), jax.random.key(3)
    expected = generate(target, None, key=key, sampling=sampling)
    for words in (jax.random.key_data(key), np.asarray(jax.random.key_data(key))):
        got = generate(target, None, key=words, sampling=sampling)
        np.testing.assert_array_equal(got.tokens, expected.tokens)
