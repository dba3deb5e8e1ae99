"""Configurations as other programs write them."""

import math

import pytest
from training import config, mlp

import ebb


def _predict(configuration):
    return ebb.predict_memory(mlp(), configuration, 2)


def test_a_dict_may_have_infinity():
    assert _predict({**config(), "steps_per_print": math.inf}) == _predict(config())
    with pytest.raises(ebb.Error, match="\"gradient_clipping\" is \"inf\"; allowed: a number of at least 0"):
        _predict({**config(), "gradient_clipping": math.inf})
