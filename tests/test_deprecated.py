"""Public names of before keep working, and say what they are called now."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.decoding.generate import stream
from specjax.draft.plain import PlainDrafter
from specjax.trees.tree import root_only
from tests.conftest import tiny_model


def test_fields_of_before_are_those_of_today():
    target = tiny_model(num_layers=1)
    step = next(stream(jax.random.key(0), target, None, [[1, 2]], max_new_tokens=1))
    shape = specjax.TreeShape((2, 1))
    with pytest.warns(DeprecationWarning, match=r"Step.seen is deprecated; it is top_tokens now"):
        assert step.seen is step.top_tokens
    with pytest.warns(DeprecationWarning, match="trial_law is deprecated; it is trial_row now"):
        assert step.tree.trial_law is step.tree.trial_row
    with pytest.warns(DeprecationWarning, match="laws is deprecated; it is distributions now"):
        np.testing.assert_array_equal(shape.laws(), shape.distributions())
    with pytest.warns(DeprecationWarning, match="it is num_distributions now"):
        assert shape.num_laws == shape.num_distributions


def test_names_of_before_are_arguments_too():
    tree = root_only(jnp.zeros(1, jnp.int32), 3)
    fields = {each.name: getattr(tree, each.name) for each in dataclasses.fields(tree)}
    row = fields.pop("trial_row")
    with pytest.warns(DeprecationWarning, match=r"TokenTree\(trial_law=...\) is deprecated"):
        assert specjax.TokenTree(**fields, trial_law=row).trial_row is row


def test_a_drafter_of_before_is_shown_what_it_asks_for():
    with pytest.warns(DeprecationWarning, match="num_seen is deprecated; it is target_top_k now"):

        class Curious(PlainDrafter):
            @property
            def num_seen(self):
                return super().num_seen + 3

    assert Curious(7).target_top_k == 3
    with pytest.warns(DeprecationWarning, match="num_seen is deprecated; it is target_top_k now"):
        assert PlainDrafter(7).num_seen == 0
    assert PlainDrafter(7).target_top_k == 0


def test_arguments_without_a_name_still_work():
    with pytest.warns(DeprecationWarning, match=r"setting_of .* give it widths=\.\.\., budget="):
        assert specjax.setting_of("specexec", None, 9) == specjax.setting_of("specexec", budget=9)
    with pytest.warns(DeprecationWarning, match=r"make_mesh without a name are .* data="):
        assert specjax.make_mesh(1).shape == specjax.make_mesh(data=1).shape
    with (
        pytest.warns(DeprecationWarning, match="widths"),
        pytest.raises(TypeError, match="multiple values for keyword argument 'widths'"),
    ):
        specjax.setting_of("chain", (1,), widths=(1,))
    with pytest.raises(TypeError, match="positional"):
        specjax.setting_of("chain", (1,), None, 1, 1, 1)
