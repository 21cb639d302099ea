"""The refusals that need the configuration alone."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from raycloak.coordinator.config.losses import LOSSES
from raycloak.coordinator.config.run import RunConfig, load_config, parse_config
from raycloak.coordinator.config.sections import DatasetConfig, DPConfig, OptimizerConfig
from raycloak.coordinator.planning.references import descriptor
from raycloak.metrics.errors import ConfigError
from raycloak.workers.inputs.augmentation import Augmentation
from raycloak.workers.inputs.descriptor import CONFIGURED, KINDS, OF_SOME_KINDS
from raycloak.workers.models.losses import BUILT_IN_LOSSES
from tests.layout import ROOT

GOOD: dict[str, Any] = {
    "expected_batch_size": 100,
    "virtual_workers": 8,
    "dataset": {"kind": "digits"},
    "dp_config": {"target_epsilon": 8.0, "target_delta": 1e-5},
}


def with_field(dotted: str, value: Any) -> dict[str, Any]:
    """Return GOOD with one field set."""
    raw: dict[str, Any] = {key: dict(part) if isinstance(part, dict) else part for key, part in GOOD.items()}
    node, (*parents, last) = raw, dotted.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    return raw


def test_the_good_configuration_is_accepted():
    config = parse_config(with_field("name", "demo"))
    assert isinstance(config, RunConfig)
    assert config.batch_size == 100
    assert config.fewest_workers == 2


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("batchsize", 10, "batchsize"),
        ("dp_config.epsilon", 1.0, "dp_config.epsilon"),
        ("dp_config.target_epsilon", 0, "dp_config.target_epsilon"),
        ("dp_config.target_epsilon", -1.0, "dp_config.target_epsilon"),
        ("dp_config.target_epsilon", float("inf"), "dp_config.target_epsilon"),
        ("dp_config.target_epsilon", float("nan"), "dp_config.target_epsilon"),
        ("dp_config.target_delta", 0, "dp_config.target_delta"),
        ("dp_config.target_delta", 1, "dp_config.target_delta"),
        ("dp_config.max_grad_norm", 0, "dp_config.max_grad_norm"),
        ("dp_config.max_grad_norm", 1e31, "dp_config.max_grad_norm"),
        ("dp_config.noise_multiplier", 1.0, "exactly one of target_epsilon and noise_multiplier"),
        ("dp_config.target_epsilon", None, "exactly one of target_epsilon and noise_multiplier"),
        ("dp_config", {"noise_multiplier": 1.0}, "noise_multiplier needs an epsilon_cap"),
        ("dp_config", {"enabled": False, "clipping": "normalised"}, "clipping belongs to private runs"),
        ("dp_config", {"noise_multiplier": 1e300, "epsilon_cap": 1.0}, "noise_multiplier: .* less than or equal"),
        ("dp_config.noise", {"bands": 4}, "dp_config.noise: .*bands belong to correlated noise: set correlated: auto"),
        ("dp_config.noise", {"correlated": "off", "bands": 4}, "bands belong to correlated noise"),
        ("dp_config.noise", {"correlated": False, "bands": 4}, "bands belong to correlated noise"),
        ("dp_config.noise.correlated", True, "dp_config.noise.correlated"),
        ("dp_config.noise.correlated", "on", "dp_config.noise.correlated"),
        ("dp_config.noise.correlated", 0, "dp_config.noise.correlated"),
        ("dp_config.noise", {"correlated": "auto", "bands": 1}, "dp_config.noise.bands: .* 2"),
        ("dp_config.noise", {"correlated": "auto", "bands": 65}, "dp_config.noise.bands: .* 64"),
        ("dp_config.noise", {"correlated": "auto", "bands": True}, "dp_config.noise.bands"),
        ("dp_config.noise", {"correlated": "auto", "band": 2}, "dp_config.noise.band.*bands"),
        ("dp_config", {"enabled": False, "noise": {"correlated": "auto"}}, "noise.correlated belongs to private runs"),
        (
            "dp_config",
            {"noise_multiplier": 1.0, "epsilon_cap": 1.0, "noise": {"correlated": "auto"}},
            "noise.correlated: auto chooses bands for a target_epsilon; give noise.bands",
        ),
        ("batch_size_per_worker", 8, "exactly one of batch_size_per_worker and expected_batch_size"),
        ("expected_batch_size", None, "exactly one of batch_size_per_worker and expected_batch_size"),
        ("virtual_workers", 2, r"virtual_workers \(2\) must be at least num_workers \(3\)"),
        ("min_workers", 4, r"min_workers \(4\) must not exceed num_workers \(3\)"),
        ("max_workers", 2, r"max_workers \(2\) must be at least num_workers \(3\)"),
        ("max_workers", 9, r"max_workers \(9\) must not exceed virtual_workers \(8\)"),
        ("min_workers", 1, "min_workers of at least 2"),
        ("secure_aggregation", False, "share of the noise"),
        ("dp_config.colluding_workers", 1, "two honest workers"),
        ("steps", True, "steps: true is not a valid value here"),
        ("optimizer.learning_rate", True, "optimizer.learning_rate: true is not a valid value here"),
        ("optimizer", {"name": "adam", "momentum": 0.9}, "momentum belongs to sgd"),
        ("optimizer.warmup_steps", 201, r"warmup_steps \(201\) exceeds steps \(200\)"),
        ("metrics.bind", "nowhere", r"metrics.bind: 'nowhere' is not an address; write host:port"),
        ("metrics.bind", "localhost:65536", "metrics.bind: .* is not an address"),
        ("metrics.bind", "::1:9464", "metrics.bind: .* is not an address"),
        ("attestation.bind", "a:99999", "attestation.bind: .* is not an address"),
        ("key_service", {"address": ":1", "contract": "x"}, "key_service.address: .* is not an address"),
        ("placement.resources_per_worker", {"CPU": -1}, "placement.resources_per_worker.CPU"),
        ("placement.resources_per_worker", {"GPU": 1}, "reserves GPUs, but use_gpu is false"),
        ("checkpoint.storage", "ftp://host/x", "checkpoint.storage: neither a path nor s3"),
        ("checkpoint.storage", "s3:///x", "checkpoint.storage: neither a path nor s3"),
        ("checkpoint.storage", "", "checkpoint.storage"),
        ("ledger.url", "", "ledger.url"),
        ("name", "n" * 101, "name"),
        ("dataset.path", "data.npz", "path belongs to all kinds but digits, module and sent"),
        ("dataset.function", "data:load", "function belongs to kind module"),
        ("dataset", {"kind": "npz"}, "path belongs to all kinds but digits, module and sent"),
        ("dataset", {"kind": "imagefolder", "path": "x"}, "size belongs to kind imagefolder"),
        ("dataset.kind", "cvs", "there is no kind of dataset 'cvs': did you mean csv?"),
        ("dataset.kind", "canaries", "there is no kind of dataset 'canaries'"),
        ("dataset", {"kind": "csv", "path": "x", "size": 4}, "size belongs to kind imagefolder"),
        ("dataset", {"kind": "imagefolder", "path": "x", "size": 4, "features": "a"}, "images have no features"),
        ("dataset", {"kind": "imagefolder", "path": "x", "size": [4, 0]}, "dataset.size"),
        (
            "dataset",
            {"kind": "hf", "path": "x", "vocabulary": 9},
            "max_length belongs to kind hf, text and text_blocks",
        ),
        ("dataset", {"kind": "hf", "path": "x", "max_length": 4}, "kind hf needs the tokenizer"),
        ("dataset", {"kind": "npz", "path": "x", "classes": ["a", "b"]}, "a list of classes belongs to kind csv"),
        ("dataset", {"kind": "csv", "path": "x", "classes": ["a", "a"]}, "a class is listed twice"),
        ("dataset", {"kind": "csv", "path": "x", "classes": []}, "dataset.classes"),
        ("dataset.unit", "patient_id", "unit belongs to all kinds but digits, text_blocks and sent"),
        ("dataset", {"kind": "csv", "path": "x", "unit": "p"}, "dataset.rows_per_unit: say how many rows"),
        ("dataset", {"kind": "csv", "path": "x", "rows_per_unit": 2}, "rows_per_unit needs the unit"),
        (
            "dataset",
            {"kind": "csv", "path": "x", "unit": "example", "rows_per_unit": 2},
            "unit: example is what",
        ),
        ("dataset", {"kind": "csv", "path": "x", "unit": "row", "rows_per_unit": 2}, "neither example nor row"),
        ("dataset", {"kind": "csv", "path": "x", "unit": "a\nb", "rows_per_unit": 2}, "printable name"),
        ("dataset", {"kind": "csv", "path": "x", "unit": "p" * 65, "rows_per_unit": 2}, "dataset.unit: .*64"),
        ("dataset", {"kind": "csv", "path": "x", "unit": "p", "rows_per_unit": 257}, "dataset.rows_per_unit: .* 256"),
        ("dataset", {"kind": "npz", "path": "x", "augment": {"kind": "shift"}}, "shift needs pixels"),
        ("dataset", {"kind": "npz", "path": "x", "augment": {"kind": "m:f", "flip": True}}, "belong to kind shift"),
        ("dataset", {"kind": "npz", "path": "x", "augment": {"kind": "turn"}}, "no kind of versions 'turn'"),
        (
            "dataset",
            {
                "kind": "csv",
                "path": "x",
                "unit": "p",
                "rows_per_unit": 8,
                "augment": {"kind": "m:f", "copies": 64},
            },
            "at most 256 rows of a unit, augment.copies included",
        ),
        ("dataset", {"kind": "csv", "path": "x", "unit": "p", "rows_per_unit": 0}, "dataset.rows_per_unit: .* than 0"),
        ("dataset", {"kind": "csv", "path": "x", "blocks_per_unit": 2}, "blocks_per_unit belongs to kind text_blocks"),
        (
            "evaluation",
            {"dataset": {"kind": "csv", "path": "x", "public": True, "unit": "p", "rows_per_unit": 2}},
            "evaluation.dataset: rows_per_unit and blocks_per_unit are for training",
        ),
        ("name", "../elsewhere", "name"),
        ("steps", 0, "steps"),
        ("optimizer.momentum", 1.0, "optimizer.momentum"),
        ("ring.bits", 24, "ring.bits"),
        ("micro_batch_bytes", 0, "micro_batch_bytes: Input should be greater than 0"),
        ("micro_batch_bytes", "2GiB", "micro_batch_bytes: Input should be a valid integer"),
        ("micro_batch_bytes", True, "micro_batch_bytes: true is not a valid value here"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(field: str, value: Any, named: str):
    with pytest.raises(ConfigError, match=named) as refusal:
        parse_config(with_field(field, value))
    assert refusal.value.exit_code == 2
    assert refusal.value.code == "config"
    assert "\n" not in str(refusal.value)
    assert not refusal.value.message.startswith("config")
    assert refusal.value.remedy


@pytest.mark.parametrize("off", ["off", False])
def test_noise_is_not_correlated_unless_it_is_asked_for(off: Any):
    """YAML reads a bare off as false."""
    said = parse_config(with_field("dp_config.noise.correlated", off))
    assert said.dp_config == parse_config(GOOD).dp_config
    read = parse_config(with_field("name", "demo"), ["dp_config.noise.correlated=off"])
    assert read.dp_config.noise.correlated == "off"
    asked = parse_config(with_field("dp_config.noise", {"correlated": "auto", "bands": 4})).dp_config.noise
    assert (asked.correlated, asked.bands) == ("auto", 4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"measurements": {"class_counts": {"classes": 3, "noise_multiplier": 20}}},
            "no proof covers measurements between its steps; leave one out",
        ),
        (
            {
                "dataset": {
                    "kind": "sent",
                    "shape": [4],
                    "classes": 3,
                    "max_participations": 2,
                    "max_examples_per_step": 400,
                }
            },
            "a client chooses the steps of what it sends, so leave it off",
        ),
    ],
)
@pytest.mark.parametrize("bands", [{}, {"bands": 4}])
def test_nothing_is_released_or_chosen_between_steps_of_correlated_noise(
    changes: dict[str, Any], named: str, bands: dict[str, int]
):
    with pytest.raises(ConfigError, match=f"dp_config.noise.correlated: {named}"):
        parse_config(with_field("dp_config.noise", {"correlated": "auto"} | bands) | changes)
    parse_config(with_field("dp_config.noise", {"correlated": "off"}) | changes)


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("stepz", "steps"),
        ("batch_size", "expected_batch_size"),
        ("target_epsilon", "dp_config.target_epsilon"),
        ("dp_config.epsilon", "dp_config.target_epsilon"),
        ("dp_config.max_grad_nrom", "dp_config.max_grad_norm"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("checkpoint.frequency", "checkpoint.checkpoint_frequency"),
        ("measurements.class_count", "measurements.class_counts"),
    ],
)
def test_an_unknown_field_is_answered_with_the_one_that_was_meant(field: str, meant: str):
    with pytest.raises(ConfigError) as refusal:
        parse_config(with_field(field, 1))
    assert refusal.value.message == f"{field}: there is no such field; did you mean {meant}?"


def test_a_field_that_is_like_no_other_is_answered_with_those_of_its_section():
    with pytest.raises(ConfigError, match=r"ring\.zzz: there is no such field; ring has bits, clamp\."):
        parse_config(with_field("ring.zzz", 1))
    hub = {"hf": "tiny", "task": "causal_lm", "lora": {"r": 8}}
    with pytest.raises(ConfigError, match=r"config: model\.lora\.r: .*did you mean model\.lora\.rank\?"):
        parse_config(with_field("model", hub))


def test_an_unknown_loss_is_answered_with_the_known_ones():
    assert set(LOSSES) == set(BUILT_IN_LOSSES)
    with pytest.raises(ConfigError, match=r"no loss 'cros_entropy': did you mean cross_entropy\?") as refusal:
        parse_config(with_field("loss", "cros_entropy"))
    assert all(loss in refusal.value.message for loss in LOSSES)
    assert parse_config(with_field("loss", "mine:loss")).loss == "mine:loss"


def test_a_key_that_is_given_twice_is_named_with_both_lines(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("name: x\nsteps: 1\ndp_config:\n  target_epsilon: 1\nsteps: 2\n")
    with pytest.raises(
        ConfigError, match=r"the key 'steps' is given twice, in lines 2 and 5\. Look at line 5, column 1"
    ):
        load_config(tmp_path / "config.yaml")


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "localhost:9464", "[::1]:65535"])
def test_an_address_is_a_host_and_a_port(bind: str):
    assert parse_config(with_field("metrics.bind", bind)).metrics.bind == bind


@pytest.mark.parametrize("storage", ["/srv/packages", "packages", "s3://bucket", "s3://bucket/prefix?region=eu"])
def test_packages_go_to_a_path_or_a_bucket(storage: str):
    assert parse_config(with_field("checkpoint.storage", storage)).checkpoint.storage == storage


def test_every_wrong_field_is_named_at_once():
    with pytest.raises(ConfigError) as refusal:
        parse_config(with_field("dp_config.target_delta", 2) | {"steps": -1, "typo": 1})
    assert all(name in refusal.value.message for name in ("dp_config.target_delta", "steps", "typo"))


def test_the_rows_of_a_micro_batch_and_its_memory_exclude_each_other():
    assert parse_config(with_field("micro_batch_bytes", 2**28)).micro_batch_bytes == 2**28
    with pytest.raises(ConfigError, match="micro_batch_size, which takes no measurement, or micro_batch_bytes"):
        parse_config(with_field("micro_batch_bytes", 2**28) | {"micro_batch_size": 4})


def test_overrides_are_yaml_and_dotted():
    config = parse_config(with_field("name", "x"), ["dp_config.target_epsilon=2.5", "optimizer.name=adam", "steps=7"])
    assert (config.dp_config.target_epsilon, config.optimizer.name, config.steps) == (2.5, "adam", 7)


@pytest.mark.parametrize("override", ["steps", "name.first=1", "unknown.field=1", "steps=[1"])
def test_wrong_overrides_are_refused(override: str):
    with pytest.raises(ConfigError, match=override.split("=")[0].split(".")[0]):
        parse_config(with_field("name", "x"), [override])


@pytest.mark.parametrize("content", ["- a\n- b\n", "", "steps: [1\n", "steps: 1\nsteps: 2\n"])
def test_a_file_that_is_no_mapping_is_refused(content: str, tmp_path: Path):
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ConfigError):
        load_config(tmp_path / "config.yaml")


def test_a_missing_file_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.yaml"):
        load_config(tmp_path / "nothing.yaml")


def test_batch_size_of_workers():
    config = parse_config({"batch_size_per_worker": 4, "num_workers": 4, "dp_config": {"target_epsilon": 1}})
    assert config.batch_size == 16.0


def test_a_single_worker_needs_no_masks():
    config = parse_config(with_field("num_workers", 1) | {"secure_aggregation": False})
    assert config.fewest_workers == 1


@pytest.mark.parametrize(
    ("epochs", "examples", "steps"), [(1, 1000, 10), (0.5, 1000, 5), (3, 1001, 31), (0.001, 1000, 1), (0.7, 1000, 7)]
)
def test_epochs_are_as_many_steps_as_draw_each_example_that_often(epochs, examples, steps):
    sized = parse_config(with_field("epochs", epochs)).sized(examples)
    assert sized.planned_steps == steps
    assert sized.epochs is None
    assert sized.sized(7) is sized


def test_steps_and_epochs_exclude_each_other_and_a_record_keeps_which_was_given():
    with pytest.raises(ConfigError, match="steps or epochs, not both"):
        parse_config({**GOOD, "steps": 3, "epochs": 1})
    given = parse_config(with_field("epochs", 2))
    assert (given.steps, parse_config(given.model_dump(mode="json"))) == (None, given)
    assert parse_config(GOOD).steps == 200
    with pytest.raises(ConfigError, match=r"warmup_steps \(9\) exceeds steps \(4\)"):
        parse_config({**GOOD, "epochs": 2, "optimizer": {"warmup_steps": 9}}).sized(200)


@pytest.mark.parametrize(
    ("field", "url", "remedy"),
    [
        ("ledger.url", "postgresql://ada:s3cr%2Ft@db.example/ledger", "~/.pgpass"),
        ("ledger.url", "postgresql://ada@db.example/ledger?sslpassword=s3cr", "~/.pgpass"),
        ("ledger.witness", "https://host/s3cr", "mode 0600"),
        ("dataset.path", "s3://AKIA:s3cr@bucket/data", "~/.aws/credentials"),
        ("evaluation.dataset.path", "s3://AKIA:s3cr@bucket/data", "~/.aws/credentials"),
        ("checkpoint.storage", "s3://AKIA:s3cr@bucket/packages", "~/.aws/credentials"),
        ("loggers.mlflow.tracking_uri", "https://ada:s3cr@host", "MLFLOW_TRACKING_PASSWORD"),
    ],
)
def test_guarantee_no_configuration_holds_a_secret_of_a_url(field: str, url: str, remedy: str) -> None:
    """Ray keeps what its actors are given, the run directory keeps the configuration, and loggers upload it."""
    data = {"kind": "parquet", "path": "train.parquet", "labels": "y"}
    raw = GOOD | {"dataset": data, "evaluation": {"dataset": data | {"public": True}}}
    parse_config(raw)
    with pytest.raises(ConfigError, match=field) as wrong:
        parse_config(raw, [f"{field}={url}"])
    assert remedy in str(wrong.value)
    with pytest.raises(ValidationError) as raised:
        RunConfig.model_validate(_with(raw, field.split("."), url))
    assert "s3cr" not in f"{wrong.value}{raised.value}{raised.value!r}"


def _with(raw: dict[str, Any], names: list[str], value: str) -> dict[str, Any]:
    first, *rest = names
    return raw | {first: _with(raw.get(first, {}), rest, value) if rest else value}


def test_the_guide_names_every_kind_of_dataset():
    lines = (ROOT / "docs" / "configuration.md").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith("| `dataset` |"))
    assert [name for name in CONFIGURED if f"`{name}`" not in row] == []


def test_the_catalogue_of_kinds_names_fields_that_there_are():
    fields = {*DatasetConfig.model_fields, "a list of labels", "a list of classes"}
    named = {*OF_SOME_KINDS, *(name for kind in KINDS.values() for name in kind.refuses)}
    assert named <= fields
    assert fields - named <= {"kind", "classes"}


def test_a_unit_is_named_by_its_column_and_that_of_blocks_is_their_document():
    table = {"kind": "csv", "path": "x", "unit": "patient_id", "rows_per_unit": 8}
    blocks = {"kind": "text_blocks", "path": "x", "tokenizer": "t", "max_length": 4, "blocks_per_unit": 3}
    for raw, unit, rows in ((table, "patient_id", 8), (blocks, "document", 3)):
        found = descriptor(DatasetConfig.model_validate(raw))
        assert (found.unit, found.rows_per_unit) == (unit, rows)


def test_versions_of_rows_are_in_the_descriptor_and_change_what_is_computed():
    table = {"kind": "npz", "path": "x", "augment": {"kind": "shift", "pixels": 1}}
    section = DatasetConfig.model_validate(table)
    found = descriptor(section)
    assert found.augment == Augmentation(kind="shift", copies=2, pixels=1)
    assert (section.unit_terms.rows_per_unit, found.rows_per_unit) == (2, 1)
    assert found.identity_digest() != found.model_copy(update={"augment": None}).identity_digest()


@pytest.mark.parametrize(
    ("noise", "optimizer", "averages"),
    [
        ({"correlated": "auto"}, {"momentum": 0.9}, True),
        ({"correlated": "auto"}, {"averaged_weights": False}, False),
        ({"correlated": "off"}, {}, False),
        ({}, {"averaged_weights": True}, True),
    ],
)
def test_weights_are_averaged_where_noise_may_be_correlated_unless_that_is_switched_off(noise, optimizer, averages):
    dp = {"target_epsilon": 3.0, "noise": noise}
    found = parse_config({**GOOD, "dp_config": dp, "optimizer": optimizer})
    assert found.optimizer.averaged_weights is averages
    assert parse_config(found.model_dump(mode="json")) == found
    typed = {"dp_config": DPConfig(**dp), "optimizer": OptimizerConfig(**optimizer)}
    assert RunConfig(**{**GOOD, **typed}).optimizer == found.optimizer
