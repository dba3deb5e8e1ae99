import dataclasses
import functools
import types

import places
import pytest
import training


@pytest.fixture(params=places.PLACES, ids=lambda place: place.name)
def at(request, tmp_path):
    """at.run(function, ...) calls function(..., place=place) on each rank of a place."""
    place = request.param
    if place.is_offloaded:
        place = dataclasses.replace(place, zero={**place.zero, **training.offloaded(str(tmp_path))})
    ranks = request.getfixturevalue("two" if place.ranks == 2 else "one")
    return types.SimpleNamespace(run=functools.partial(ranks.run, place=place))
