"""A site of the desk, whole services, and stores on each kind of database."""

import pytest

from tests.coordinator.service.scripted import Site
from tests.coordinator.service.serving import Served


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.server)])
def store_url(request, tmp_path):
    """Return the URL of a store that does not exist yet, on each kind of database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'state' / 'service.sqlite'}"
    return request.getfixturevalue("postgres").url()


@pytest.fixture
def make_site(tmp_path):
    """Return a maker of sites in one folder, which are closed at the end."""
    made = []

    def make(**fields):
        for each in made:
            each.close()
        made[:] = [Site(tmp_path, **fields)]
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def site(make_site):
    """Return a site with the usual limits."""
    return make_site()


@pytest.fixture
def serve(tmp_path):
    """Return a maker of services in one folder, which are stopped at the end."""
    made = []

    def make(**fields):
        made.append(Served(tmp_path, **fields))
        return made[-1]

    yield make
    for each in made:
        each.stop()
