"""A model written at a size that nobody trained: the small one's logits, noise elsewhere, whole."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.__main__ import main
from specjax.checkpoints import inflating
from specjax.checkpoints.files import CheckpointError, find, tensors
from specjax.checkpoints.huggingface import save_model
from specjax.checkpoints.inflating import inflate_folder, shape_of
from specjax.checkpoints.load import load_model
from specjax.checkpoints.quantizing import quantize_folder
from specjax.models.config import ModelConfig
from specjax.models.experts import route
from specjax.models.transformer import forward
from tests.conftest import tiny_model
from tests.folders import pair_folder

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 7)), jnp.int32)


def logits_of(model):
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1], dtype=jnp.int32), TOKENS.shape)
    return np.asarray(jax.jit(forward)(model, TOKENS, positions, None, None)[0])


@pytest.fixture
def narrow(monkeypatch):
    """Layers as narrow as those of the models here."""
    monkeypatch.setattr(inflating, "_WIDTH_OF_LAYERS", 16)


def written(model, folder, parameters):
    save_model(model, folder / "small", dtype="bfloat16")
    done = inflate_folder(find(folder / "small"), folder / "large", parameters)
    return done, folder / "large"


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False}, {"num_layers": 1}])
def test_logits_are_those_of_the_small_model(changes, tmp_path, narrow):
    model = tiny_model(**changes)
    done, large = written(model, tmp_path, 12 * model.config.num_parameters)
    small, grown = (load_model(find(f), dtype="float32") for f in (tmp_path / "small", large))
    assert grown.config.hidden_size > small.config.hidden_size
    assert grown.config.num_layers == done.layers > small.config.num_layers
    assert 6 < done.parameters / model.config.num_parameters < 18
    np.testing.assert_allclose(logits_of(grown), logits_of(small), atol=1e-4)


def test_idle_layers_add_nothing_quantized_either(tmp_path, narrow):
    model = tiny_model(hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=8)
    _, large = written(model, tmp_path, 12 * model.config.num_parameters)
    quantize_folder(find(large), tmp_path / "packed", 4, 8)
    packed = load_model(find(tmp_path / "packed"), dtype="float32")
    parts = {name: getattr(packed, name) for name in packed.__dataclass_fields__}
    fewer = type(packed)(**parts | {"layers": packed.layers[: model.config.num_layers]})
    np.testing.assert_array_equal(logits_of(packed), logits_of(fewer))


def test_what_the_function_does_not_depend_on_is_noise(tmp_path, narrow):
    model = tiny_model(hidden_size=16)
    _, large = written(model, tmp_path, 12 * model.config.num_parameters)
    for name, _, tensor in tensors(find(large)):
        if name.endswith("proj.weight"):
            zero = np.mean(np.asarray(tensor, np.float32) == 0)
            assert zero < 0.6, name
            assert np.unique(np.asarray(tensor, np.float32)).size > 100, name


def test_a_mixture_has_the_logits_of_the_small_model_whatever_is_chosen(tmp_path, narrow):
    model = tiny_model()
    save_model(model, tmp_path / "small", dtype="bfloat16")
    size = 40 * model.config.num_parameters
    inflate_folder(find(tmp_path / "small"), tmp_path / "large", size, experts=(5, 2))
    small, grown = (
        load_model(find(tmp_path / name), dtype="float32") for name in ("small", "large")
    )
    assert grown.config.family == "mixtral"
    assert grown.config.hidden_size > small.config.hidden_size
    assert 0.5 < grown.config.num_parameters / size < 1.5
    np.testing.assert_allclose(logits_of(grown), logits_of(small), atol=1e-4)
    experts = grown.layers[0].expert_up
    assert experts.shape[0] == 5
    assert not (experts[0] == experts[1]).all()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((grown.config.hidden_size, 40)))
    chosen = route(grown.config.experts, grown.layers[0], x.astype(jnp.float32)).chosen
    assert len(np.unique(chosen)) == 5


def test_depth_goes_with_width():
    small = ModelConfig(
        vocab_size=4096, hidden_size=640, intermediate_size=1536, num_layers=4, num_heads=10,
        num_kv_heads=2, head_dim=64, max_positions=2048,
    )  # fmt: skip
    for parameters in (100_000_000, 2_000_000_000, 7_500_000_000):
        found = shape_of(small, parameters)
        assert 0.85 < found.num_parameters / parameters < 1.15
        assert 20 <= found.hidden_size / found.num_layers <= 128


def test_what_cannot_be_written_is_said_and_nothing_is_left(tmp_path, capsys):
    target = str(pair_folder() / "target")
    assert main(["inflate", target, f"{tmp_path}/out", "--parameters", "10"]) == 2
    assert "it cannot be inflated to 10" in capsys.readouterr().err
    asked = ["inflate", target, f"{tmp_path}/out", "--parameters", "1M"]
    for experts, said in (
        (("--experts", "4096"), "with 4096 experts the model has"),
        (("--experts", "1"), "experts_per_token is 2; it must be an integer from 1 to 1"),
    ):
        assert main([*asked, *experts]) == 2
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(["inflate", target, f"{tmp_path}/out", "--parameters", "1M"]) == 0
    assert "parameters in" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(CheckpointError, match="exists already"):
        inflate_folder(find(target), tmp_path / "out", 1_000_000)
