import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def one():
    ranks = Ranks(1)
    yield ranks
    ranks.stop()


@pytest.fixture
def ranks(request):
    """One of these two, by parametrize("ranks", ["one", "two"], indirect=True)."""
    return request.getfixturevalue(request.param)
