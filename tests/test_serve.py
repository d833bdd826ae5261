"""`specjax serve` as a process: OpenAI's client, texts of the target alone, a signal, its end."""

import asyncio
import json
import os
import signal
import time

import httpx
import openai
import pytest

from benchmarks.serving.process import serving
from specjax.__main__ import main
from specjax.cli import serve as verb
from tests.conftest import QUICKLY
from tests.folders import END, answer, pair_flags

PROMPT = "def add(a, b):\n"


def process(*flags):
    """A server of the tiny pair."""
    return serving(*pair_flags(), "--port", "0", *flags, environment=os.environ | QUICKLY)


@pytest.fixture(scope="module")
def server():
    with process("--method", "chain", "--rows", "2", "--strict-fields") as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="any", max_retries=0) as made:
        yield made


def complete(client, **options):
    named = client.models.list().data[0].id
    return client.completions.create(
        model=named, prompt=PROMPT, **({"temperature": 0.0, "max_tokens": 40} | options)
    )


@pytest.mark.slow
def test_a_text_is_that_of_generate(client, capsys):
    expected = answer(capsys, "generate", PROMPT, "--method", "none", "--max-new-tokens", "40")
    made = complete(client, logprobs=1)
    assert made.choices[0].text == expected["text"]
    assert made.usage.completion_tokens == expected["new_tokens"]
    assert made.choices[0].logprobs.token_logprobs == [
        max(each.values()) for each in made.choices[0].logprobs.top_logprobs
    ]
    assert made.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    with complete(client, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == expected["text"]
    again = complete(client, stop=[expected["text"][7:10]])
    assert again.choices[0].text == expected["text"][:7]
    assert again.choices[0].finish_reason == "stop"


@pytest.mark.slow
def test_a_special_token_as_a_stop_ends_in_the_engine(client):
    """Also where end tokens end nothing; the likeliest token is that one here."""
    likely = {"logit_bias": {"0": 100}, "extra_body": {"ignore_eos": True}, "max_tokens": 5}
    for stop, count in ((None, 5), (END, 1), (["x", END], 1), (END + "x", 5)):
        made = complete(client, stop=stop, **likely)
        assert made.choices[0].text == ""
        assert made.usage.completion_tokens == count
        assert made.choices[0].finish_reason == ("length" if count == 5 else "stop")


@pytest.mark.slow
def test_a_seed_names_a_text_whatever_runs_beside_it(server, client):
    alone = [complete(client, seed=seed, temperature=0.9, n=2) for seed in range(3)]

    async def together():
        url = f"{server[0]}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as own:
            named = (await own.models.list()).data[0].id
            return await asyncio.gather(
                *(
                    own.completions.create(
                        model=named, prompt=PROMPT, seed=seed, temperature=0.9, n=2, max_tokens=40
                    )
                    for seed in range(3)
                ),
                *(own.completions.create(model=named, prompt="x" * k) for k in range(1, 20)),
            )

    beside = asyncio.run(together())[:3]
    for one, other in zip(alone, beside, strict=True):
        assert [c.text for c in one.choices] == [c.text for c in other.choices]


@pytest.mark.slow
def test_a_client_that_leaves_frees_its_row(server, client):
    def running() -> float:
        text = httpx.get(f"{server[0]}/metrics").text
        (line,) = (each for each in text.splitlines() if each.startswith("vllm:num_requests_runn"))
        return float(line.split()[-1])

    stream = complete(client, stream=True, max_tokens=200, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    end = time.monotonic() + 5
    while running() and time.monotonic() < end:
        time.sleep(0.01)
    assert running() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 300}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"best_of": 3}}, "best_of"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"extra_body": {"colour": 1}}, "colour"),
    ],
)
def test_what_is_refused_names_its_field(client, options, param):
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, **options)
    assert refused.value.param == param


@pytest.mark.slow
def test_a_signal_lets_a_stream_end_and_the_process_with_0(capfd):
    with process("--method", "none", "--rows", "1") as (url, running):
        body = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            running.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert running.wait(20) == 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--rows", "0"), "--rows is 0"),
        (("--port", "70000"), "--port is 70000"),
        (("--max-model-len", "999"), "max_model_len is 999; it must lie in [2, 256]"),
        (("--method", "nothing"), "no method 'nothing'"),
        (("--drain-seconds", "-1"), "--drain-seconds is -1.0"),
        (("--api-key", " ,"), "--api-key is ' ,' and holds no key"),
    ],
)
def test_wrong_options_are_one_sentence(flags, sentence, capsys):
    assert main(["serve", *pair_flags(), *flags]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_a_name_for_keys_without_one_opens_no_server(capsys, monkeypatch):
    monkeypatch.setenv("SPECJAX_API_KEY", "")
    assert main(["serve", *pair_flags()]) == 2
    assert "SPECJAX_API_KEY is '' and holds no key" in capsys.readouterr().err


@pytest.mark.slow
def test_a_signal_while_the_weights_are_read_ends_the_process_with_0(monkeypatch):
    """Before anything listens, where it would end with 143, or in a container not at all."""

    def load(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(verb, "pair_of", load)
    with pytest.raises(SystemExit) as ended:
        main(["serve", *pair_flags()])
    assert ended.value.code == 0
    assert signal.getsignal(signal.SIGTERM) is before
