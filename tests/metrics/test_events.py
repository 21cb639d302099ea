import json
import math

import pytest

from raycloak.metrics.errors import ConfigError, RefusedError
from raycloak.metrics.events import FIELDS, EventWriter


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_on_disk_before_write_returns(path):
    with EventWriter(path, clock=lambda: 12.5) as events:
        events.write("step", step=3, model_digest="ab" * 32, epsilon=0.5, evaluation_accuracy=None, workers=3)
        assert lines(path) == [
            {"event": "step", "time": 12.5, "step": 3, "model_digest": "ab" * 32, "epsilon": 0.5, "workers": 3}
        ]


def test_a_second_writer_appends(path):
    for step in range(2):
        with EventWriter(path) as events:
            events.write("step", step=step)
    assert [line["step"] for line in lines(path)] == [0, 1]


@pytest.mark.parametrize("torn", [b'{"event":"step","st', b"{"])
def test_a_line_that_a_crash_left_unfinished_is_cut_off(path, torn):
    path.write_bytes(b'{"event":"step","step":0}\n' + torn)
    with EventWriter(path) as events:
        events.write("step", step=1)
    assert [line["step"] for line in lines(path)] == [0, 1]


def test_secret_fields_are_never_written(path):
    secret = [field for field in FIELDS if not field.privacy.exportable]
    assert {"loss", "examples", "gradient_norm"} <= {field.name for field in secret}
    with EventWriter(path) as events:
        for field in secret:
            with pytest.raises(RefusedError) as caught:
                events.write("step", step=1, **{field.name: 1})
            assert caught.value.code == "event_secret"
    assert path.read_bytes() == b""


@pytest.mark.parametrize("name", ["mood", "time", "traceback"])
def test_undeclared_fields_are_refused(path, name):
    with EventWriter(path) as events, pytest.raises(RefusedError) as caught:
        events.write("step", **{name: 1})
    assert caught.value.code == "event_field"
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("code", "worker died: tensor([0.1, 0.2])"),
        ("code", 3),
        ("step", 1.5),
        ("step", True),
        ("step", "1"),
        ("epsilon", math.nan),
        ("epsilon", math.inf),
        ("seconds", "fast"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(path, name, value):
    with EventWriter(path) as events, pytest.raises(RefusedError) as caught:
        events.write("step", **{name: value})
    assert caught.value.code == "event_value"
    assert path.read_bytes() == b""


def test_an_event_name_is_an_identifier(path):
    with EventWriter(path) as events, pytest.raises(RefusedError):
        events.write("step failed because")


def test_field_names_are_declared_once():
    assert len({field.name for field in FIELDS}) == len(FIELDS)


def test_a_file_that_cannot_be_opened_is_the_users_error(tmp_path):
    with pytest.raises(ConfigError) as caught:
        EventWriter(tmp_path / "absent" / "metrics.jsonl")
    assert caught.value.code == "events_file"
