"""The checks of a model, which the workers of these tests make once for each kind; and Triton's interpreter."""

import pytest

from tests.checked_once import checked_once as checked_once


@pytest.fixture
def interpreted(request, run_python):
    """Return a function that runs functions of the module that a test file calls ``INTERPRETED``, in one process."""

    def run(*names):
        done = run_python("-m", request.module.INTERPRETED, *names, environment={"TRITON_INTERPRET": "1"})
        assert done.code == 0, done.stdout + done.stderr

    return run
