"""A file that cannot be used: the fact and the way out. And every error of input has a way out."""

import ast
import errno
import os

import pytest

from raycloak.metrics.errors import ConfigError, DatasetError
from raycloak.metrics.file_errors import file_error
from tests.layout import ROOT, SOURCES

INPUT_ERRORS = {"ConfigError", "DatasetError", "ModelError"}


@pytest.mark.parametrize(
    ("number", "verb", "remedy"),
    [
        (errno.ENOENT, "read", "Check the path."),
        (errno.ENOENT, "write", "Make its folder first"),
        (errno.EISDIR, "read", "Name a file"),
        (errno.EACCES, "read", "Let this user in"),
        (errno.ENOSPC, "write", "Make room"),
        (errno.EIO, "read", "Check the path and the disk."),
    ],
)
def test_the_remedy_fits_the_systems_reason(number: int, verb: str, remedy: str):
    error = file_error("policy", verb, "/x/policy.yaml", OSError(number, os.strerror(number)))
    assert (error.code, error.message) == ("policy", f"cannot {verb} /x/policy.yaml: {os.strerror(number)}.")
    assert error.remedy.startswith(remedy)


def test_an_error_without_a_number_still_says_something():
    error = file_error("dataset_unreadable", "read", "x.npz", OSError("half a file"), DatasetError)
    assert str(error) == "dataset_unreadable: cannot read x.npz: half a file. Check the path and the disk."
    assert type(error) is DatasetError
    assert isinstance(error, ConfigError)


def test_every_error_of_input_names_a_way_out():
    speechless = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in SOURCES
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in INPUT_ERRORS
        and len(call.args) < 3
        and not any(isinstance(argument, ast.Starred) for argument in call.args)
    ]
    assert speechless == []
