"""The average of two heads' weights."""

import json

import jax
import numpy as np
import pytest

from specjax.checkpoints.feature_drafts import load_feature_draft
from specjax.checkpoints.files import Files, find
from specjax.checkpoints.load import load_model
from specjax.checkpoints.quantizing import quantize_folder
from specjax.models.quantized import PackedWeight
from tests import eagle_twin
from tests.damaged import dequantized
from tests.folders import VOCABULARY, target_folder
from train.average import main

SIZE = 32


@pytest.fixture
def folders(tmp_path):
    """A target, a head and another one that is packed."""
    target = target_folder(tmp_path / "target", 3, num_layers=4, hidden_size=SIZE)
    dialect = eagle_twin.Dialect((0, 1, 2), "outputs")
    known = {"d2t", "t2d"} & {*eagle_twin.head_of(dialect, VOCABULARY, SIZE)}
    assert known
    for seed, name in enumerate(("one", "two")):
        tensors = eagle_twin.head_of(dialect, VOCABULARY, SIZE, seed)
        first = eagle_twin.head_of(dialect, VOCABULARY, SIZE)
        tensors |= {each: first[each] for each in known}
        eagle_twin.write(tmp_path / name, dialect, tensors, VOCABULARY, SIZE)
    tensors = eagle_twin.head_of(dialect, VOCABULARY, SIZE, 1)
    eagle_twin.write(tmp_path / "three", dialect, tensors, VOCABULARY, SIZE)
    quantize_folder(find(tmp_path / "two"), tmp_path / "packed", 8)
    return tmp_path, target


def test_weights_lie_between_those_of_both(folders, capsys):
    at, target = folders
    asked = [str(target), str(at / "made"), str(at / "one"), str(at / "packed")]
    assert main([*asked, "--share", "0.25"]) == 0
    model = load_model(target)
    one, packed, made = (
        load_feature_draft(Files(at / name), model, dtype="float32")
        for name in ("one", "packed", "made")
    )
    is_packed = lambda leaf: isinstance(leaf, PackedWeight)  # noqa: E731
    other = jax.tree.map(lambda leaf: dequantized(leaf) if is_packed(leaf) else leaf, packed,
                         is_leaf=is_packed)  # fmt: skip
    for own, others, found in zip(*map(jax.tree.leaves, (one, other, made)), strict=True):
        np.testing.assert_allclose(found, 0.75 * own + 0.25 * others, rtol=2**-8)  # bfloat16
    assert main(asked) == 2
    assert "is there already; name another folder" in capsys.readouterr().err


def test_heads_that_differ_have_no_average(folders, capsys):
    at, target = folders
    file = at / "packed" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 5.0}))
    asked = [str(target), str(at / "made"), str(at / "one"), str(at / "packed")]
    assert main(asked) == 2
    assert "the heads differ" in capsys.readouterr().err
    assert main([*asked[:3], str(at / "three")]) == 2
    assert "the heads know other tokens" in capsys.readouterr().err
    assert main([*asked, "--share", "1.5"]) == 2
    assert "the share is 1.5; it must lie from 0 to 1" in capsys.readouterr().err
    assert not (at / "made").exists()
