"""`raycloak` itself is the public interface: sorted, complete and documented."""

import ast
import inspect

import pytest

import raycloak
from raycloak.metrics import errors


def test_all_is_sorted_and_without_repeats():
    assert raycloak.__all__ == sorted(set(raycloak.__all__))


def test_each_name_resolves_and_says_what_it_is():
    exported = {name: getattr(raycloak, name) for name in raycloak.__all__}
    spoken = {name: each for name, each in exported.items() if inspect.isclass(each) or inspect.isfunction(each)}
    assert [name for name, each in spoken.items() if not inspect.getdoc(each)] == []


def test_type_checkers_see_what_is_imported_on_first_use():
    (seen,) = (node for node in ast.parse(inspect.getsource(raycloak)).body if isinstance(node, ast.If))
    assert {alias.asname: node.module for node in seen.body for alias in node.names} == raycloak._HOME


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = raycloak.no_such_name


def test_every_error_a_user_may_catch_is_exported():
    tree = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.RaycloakError)
    }
    assert tree <= set(raycloak.__all__)


def test_the_actors_are_exported():
    actors = {"EvidenceOrchestrator", "MaskedAggregator", "PrivacyLedger", "TrainWorker"}
    assert actors | {"DPConfig", "RunConfig", "Trainer"} <= set(raycloak.__all__)
