import sys

import ebb.deepspeed
import pytest
from ranks import Ranks


@pytest.fixture(scope="package", autouse=True)
def deepspeed_is_in_the_path():
    """As after `python -m ebb.deepspeed`: other tests of this process may have imported accelerate."""
    sys.path.insert(0, ebb.deepspeed.PATH)
    yield
    sys.path.remove(ebb.deepspeed.PATH)


@pytest.fixture(scope="package")
def two():
    """Ranks of this folder alone: after ebb.deepspeed.install() a process sees deepspeed until it ends."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="package")
def one():
    ranks = Ranks(1)
    yield ranks
    ranks.stop()
