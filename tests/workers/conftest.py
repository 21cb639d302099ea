"""The checks of a model, which the workers of these tests make once for each kind."""

from tests.checked_once import checked_once as checked_once
