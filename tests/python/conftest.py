import os
import sys

import pytest
from ranks import staying


@pytest.fixture(scope="module", autouse=True)
def the_environment_as_it_was():
    """A file of tests leaves the next one no variables, folders of the path or modules called deepspeed."""
    environment, path, modules = dict(os.environ), list(sys.path), set(sys.modules)
    yield
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    for name in [one for one in sys.modules if one.partition(".")[0] == "deepspeed" and one not in modules]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def two():
    yield from staying(2)


@pytest.fixture(scope="session")
def one():
    yield from staying(1)


@pytest.fixture
def ranks(request):
    """One of these two, by parametrize("ranks", ["one", "two"], indirect=True)."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def pair():
    """Two ranks with a torch.distributed group of their own."""
    yield from staying(2)


@pytest.fixture(scope="module")
def four():
    yield from staying(4)
