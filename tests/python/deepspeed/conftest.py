import pytest
from ranks import Ranks


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
