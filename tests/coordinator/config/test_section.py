"""A section refuses wrong fields in the same words, whether its class is called or plain data is read."""

import inspect

import pytest

import raycloak
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.config.section import Section, validated
from raycloak.metrics.errors import ConfigError, RaycloakError

PUBLIC = [
    found
    for name in raycloak.__all__
    if inspect.isclass(found := getattr(raycloak, name)) and issubclass(found, Section)
]


@pytest.mark.parametrize("section", PUBLIC, ids=lambda section: section.__name__)
def test_a_wrong_field_of_every_public_section_is_refused_by_name(section: type[Section]):
    with pytest.raises(RaycloakError, match="no_such_field: there is no such field") as caught:
        section(no_such_field=1)
    assert (caught.value.code, caught.value.exit_code) == ("config", 2)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__, "no traceback of pydantic's"


def test_python_and_plain_data_are_refused_in_the_same_words():
    wrong = {"expected_batch_size": 1, "dp_config": {"target_epsilon": -1.0, "delta": 1e-5}, "lr": 0.1, "steps": 0}
    said = set()
    for make in (lambda: RunConfig(**wrong), lambda: parse_config(dict(wrong)), lambda: validated(RunConfig, wrong)):
        with pytest.raises(ConfigError) as caught:
            make()
        said.add(str(caught.value))
    (text,) = said
    for field in ("dp_config.target_epsilon: ", "dp_config.delta: there is no such field", "lr: there", "steps: "):
        assert field in text


def test_a_section_in_a_section_keeps_its_class():
    config = RunConfig(expected_batch_size=1, dp_config=raycloak.DPConfig(target_epsilon=1.0))
    assert config == RunConfig(expected_batch_size=1, dp_config={"target_epsilon": 1.0})
    assert isinstance(config.dp_config, raycloak.DPConfig)
