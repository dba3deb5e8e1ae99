import sys

import ebb.deepspeed
import pytest
from ranks import staying


@pytest.fixture(scope="package", autouse=True)
def deepspeed_is_in_the_path():
    """As after `python -m ebb.deepspeed`: other tests of this process may have imported accelerate."""
    sys.path.insert(0, ebb.deepspeed.PATH)
    yield
    sys.path.remove(ebb.deepspeed.PATH)


@pytest.fixture(scope="package")
def two():
    """Ranks of this folder alone: after ebb.deepspeed.install() a process sees deepspeed until it ends."""
    yield from staying(2)


@pytest.fixture(scope="package")
def one():
    yield from staying(1)
