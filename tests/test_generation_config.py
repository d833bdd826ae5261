"""What `generation_config.json` files ask for, real ones and wrong ones."""

import json

import pytest

from specjax.checkpoints.files import CheckpointError
from specjax.checkpoints.generation_config import FILE, defaults_for

QWEN = {"do_sample": True, "eos_token_id": [151645, 151643], "repetition_penalty": 1.05,
        "temperature": 0.7, "top_p": 0.8, "top_k": 20}  # fmt: skip
LLAMA = {"do_sample": True, "eos_token_id": [128001, 128008, 128009], "temperature": 0.6,
         "top_p": 0.9, "transformers_version": "4.42.3"}  # fmt: skip
GEMMA = {"cache_implementation": "hybrid", "do_sample": True, "eos_token_id": [1, 106],
         "top_k": 64, "top_p": 0.95}  # fmt: skip
MISTRAL = {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2}
BART = {"num_beams": 4, "length_penalty": 2.0, "no_repeat_ngram_size": 3, "min_length": 56,
        "forced_eos_token_id": 2, "early_stopping": True, "max_length": 142}  # fmt: skip


def defaults(folder, config, named="auto"):
    (folder / FILE).write_text(json.dumps(config))
    return defaults_for(named, folder)


@pytest.mark.parametrize(
    ("config", "values", "not_honoured"),
    [
        (QWEN, {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}, ""),
        (LLAMA, {"temperature": 0.6, "top_p": 0.9}, ""),
        (GEMMA, {"top_k": 64, "top_p": 0.95}, ""),
        (MISTRAL, {}, ""),
        ({"max_new_tokens": 40, "temperature": 1e-6}, {"temperature": 1e-6, "max_tokens": 40}, ""),
        ({"temperature": None, "top_k": -1, "min_p": 0.05}, {"top_k": 0, "min_p": 0.05}, ""),
        ({"top_k": 50.0, "typical_p": 1.0, "bad_words_ids": None}, {"top_k": 50}, ""),
        (BART, {}, "num_beams 4, length_penalty 2.0, no_repeat_ngram_size 3, forced_eos_token_id "
                   "2, min_length 56 are"),
        ({"do_sample": False, "temperature": 0.2}, {"temperature": 0.2}, "do_sample False is"),
    ],
)  # fmt: skip
def test_a_models_file_gives_defaults_and_says_so(tmp_path, config, values, not_honoured):
    found = defaults(tmp_path, config)
    assert found.values == values
    said = list(found.notices)
    if values:
        first = said.pop(0)
        for name, value in values.items():
            assert f"{name} {value:g}" in first
        assert first.endswith(
            " of generation_config.json; --generation-config none leaves them out."
        )
    expected = f"generation_config.json: {not_honoured} not honoured."
    assert said == ([expected] if not_honoured else [])


def test_values_that_no_request_may_have_are_left_out_with_a_sentence(tmp_path):
    wrong = {"temperature": "hot", "top_p": float("nan"), "top_k": 1.5, "min_p": -1,
             "repetition_penalty": [1.1], "max_new_tokens": 0}  # fmt: skip
    found = defaults(tmp_path, wrong)
    assert found.values == {}
    assert found.notices == (
        "generation_config.json: temperature is 'hot'; it must be a finite number; it is left out.",
        "generation_config.json: top_p is nan; it must be a finite number; it is left out.",
        "generation_config.json: top_k is 1.5; it must be an integer; it is left out.",
        "generation_config.json: min_p is -1.0; it must lie in [0, 1]; it is left out.",
        "generation_config.json: repetition_penalty is [1.1]; it must be a finite number; it is "
        "left out.",
        "generation_config.json: max_new_tokens is 0; it must be at least 1; it is left out.",
    )
    assert defaults(tmp_path, {"top_k": 10**20}).notices[0].startswith(f"{FILE}: top_k is 1000")
    for temperature in (-1, True, 1e-45, 10**400):
        assert defaults(tmp_path, {"temperature": temperature}).values == {}


def test_another_folder_or_none_may_be_named(tmp_path):
    assert defaults_for("auto", tmp_path).values == {}
    assert defaults(tmp_path, QWEN, "none").values == {}
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(CheckpointError, match=r"other', and there is no .*other/generation_conf"):
        defaults_for(str(other), tmp_path)
    assert defaults(other, LLAMA, str(other)).values == {"temperature": 0.6, "top_p": 0.9}
    (tmp_path / FILE).write_text("[1]")
    with pytest.raises(CheckpointError, match=f"{FILE} holds a list, not an object"):
        defaults_for("auto", tmp_path)
