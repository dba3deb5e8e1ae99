import dataclasses

import places
import pytest
import training


@pytest.fixture(params=places.PLACES, ids=lambda place: place.name)
def at(request, tmp_path):
    """at(function, ...) calls function(place, ...) on each rank of a place."""
    place = request.param
    if place.is_offloaded:
        place = dataclasses.replace(place, zero=training.offloaded(str(tmp_path)))
    ranks = request.getfixturevalue("two" if place.ranks == 2 else "one")
    return lambda function, *arguments: ranks.run(function, place, *arguments)
