"""Both `plan` and the trainer check what a configuration names before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from raycloak.coordinator.cli.views.plan import plan_rows
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.config.sections import DatasetConfig
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.coordinator.planning.references import descriptor, preflight
from raycloak.coordinator.runs.trainer import Trainer
from raycloak.metrics.errors import ConfigError, ModelError
from tests.coordinator.ledger.witness_server import url_file
from tests.protocol import config, worker_setup

GOOD: dict[str, Any] = {
    "expected_batch_size": 100,
    "steps": 2,
    "model": "raycloak.coordinator.runs.demo:digits_model",
    "dataset": {"kind": "digits"},
    "dp_config": {"target_epsilon": 8.0},
}
UNUSABLE = [
    ({"evaluation": {"dataset": {"kind": "digits", "split": "public"}}}, "evaluation_not_public"),
    ({"ledger": {"url": "mysql://host/x"}}, "ledger_url"),
    ({"ledger": {"url": "ledger.sqlite"}}, "ledger_url"),
    ({"ledger": {"url": "sqlite:///ledger.sqlite"}}, "ledger_url"),
    ({"ledger": {"witness": "witness"}}, "witness"),
    ({"checkpoint": {"recipients": ["none.pub"]}}, "recipient"),
    ({"key_service": {"address": "owner:7443", "contract": "none.json"}}, "key_service"),
]


def apart(trained: dict[str, Any], measured: dict[str, Any], **changes: Any) -> RunConfig:
    return parse_config(GOOD | {"dataset": trained, "evaluation": {"dataset": measured | {"public": True}}} | changes)


def npz(path: str) -> dict[str, Any]:
    return {"kind": "npz", "path": path}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Private data under several names, and a split of its own."""
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "train.npz").write_bytes(b"private")
    (tmp_path / "in" / "test.npz").write_bytes(b"private")
    (tmp_path / "linked.npz").symlink_to(tmp_path / "in" / "train.npz")
    (tmp_path / "hard.npz").hardlink_to(tmp_path / "in" / "train.npz")
    (tmp_path / "here").symlink_to(tmp_path / "in")
    return tmp_path


@pytest.mark.parametrize(
    "measured",
    ["in/train.npz", "in/deep/../train.npz", "./in//train.npz", "linked.npz", "hard.npz", "here/train.npz", "ABSOLUTE",
     "in", "here", ".", "in/train.npz/part"],
)  # fmt: skip
def test_one_path_is_not_both_private_data_and_public_split(measured: str, folder: Path):
    path = str(folder / "in" / "train.npz") if measured == "ABSOLUTE" else measured
    with pytest.raises(ConfigError, match="evaluation_private"):
        preflight(apart(npz("in/train.npz"), npz(path)), folder)
    with pytest.raises(ConfigError, match="evaluation_private"):
        preflight(apart(npz(path), npz("in/train.npz")), folder)


@pytest.mark.parametrize(
    ("trained", "measured", "shared"),
    [
        ("in", "in/*.npz", True),
        ("in/t*.npz", "in/train.npz", True),
        ("in/train*", "in/t*t.npz", False),
        ("s3://bucket/data?region=x", "s3://bucket/data/part.parquet", True),
        ("s3://bucket/train", "s3://bucket/test", False),
    ],
)
def test_a_pattern_or_a_bucket_is_not_both_either(trained: str, measured: str, shared: bool, folder: Path):
    one, other = ({"kind": "csv", "path": path} for path in (trained, measured))
    if not shared:
        preflight(apart(one, other), folder)
        return
    for pair in ((one, other), (other, one)):
        with pytest.raises(ConfigError, match="evaluation_private"):
            preflight(apart(*pair), folder)


def test_two_folders_of_images_have_the_same_classes(tmp_path: Path):
    for name in ("train/cats/1.png", "train/dogs/2.png", "test/dogs/1.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    one, other = ({"kind": "imagefolder", "path": path, "size": 8} for path in ("train", "test"))
    with pytest.raises(ConfigError, match="evaluation_classes"):
        preflight(apart(one, other), tmp_path)
    listed = {"classes": ["cats", "dogs"]}
    preflight(apart(one | listed, other | listed), tmp_path)
    preflight(apart(one, other | listed), tmp_path)


def test_a_list_of_classes_is_the_same_for_both_tables(folder: Path):
    one, other = ({"kind": "csv", "path": path, "classes": ["a", "b"]} for path in ("in/train.csv", "in/test.csv"))
    preflight(apart(one, other), folder)
    with pytest.raises(ConfigError, match=r"evaluation\.dataset\.classes must be dataset\.classes"):
        apart(one, other | {"classes": ["b", "a"]})


def test_a_descriptor_has_the_defaults_of_its_kind():
    table = descriptor(DatasetConfig(kind="csv", path="x.csv", classes=["a", "b"]))
    assert (table.features, table.classes, table.class_names) == ((), 2, ("a", "b"))
    images = descriptor(DatasetConfig(kind="imagefolder", path="x", size=8))
    assert (images.size, images.scale, images.channels) == ((8, 8), 255.0, "rgb")
    assert descriptor(DatasetConfig(kind="imagefolder", path="x", size=(4, 8), scale=1.0)).scale == 1.0
    assert descriptor(DatasetConfig(kind="npz", path="x")).features == ("images",)
    text = descriptor(DatasetConfig(kind="text", path="x", tokenizer="t", max_length=4))
    assert text.features == ("text",)


def test_a_sealed_folder_is_not_both_either(folder: Path):
    sealed = {"kind": "sealed", "path": "in", "key_file": "data.key"}
    for one, other in ((sealed, sealed), (sealed, npz("in/test.npz")), (npz("in/test.npz"), sealed)):
        with pytest.raises(ConfigError, match="evaluation_private"):
            preflight(apart(one, other), folder)


def test_one_function_and_one_part_of_the_digits_are_not_both(folder: Path):
    function = {"kind": "module", "function": "hospital:patients"}
    for same in (function, {"kind": "digits"}, {"kind": "digits", "split": "public"}):
        with pytest.raises(ConfigError, match="evaluation_private"):
            preflight(apart(same, same), folder)


def test_data_declared_public_on_both_sides_is_still_not_both_where_privacy_is_on(folder: Path):
    both = npz("in/train.npz") | {"public": True}
    with pytest.raises(ConfigError, match="evaluation_private"):
        preflight(apart(both, both), folder)
    preflight(apart(both, both, dp_config={"enabled": False}), folder)


@pytest.mark.parametrize(
    ("trained", "measured"),
    [
        (npz("in/train.npz"), npz("in/test.npz")),
        (npz("in/train.npz"), npz("in/train.npz2")),
        (npz("in/train.npz"), npz("not-there-yet.npz")),
        ({"kind": "digits"}, {"kind": "digits", "split": "public"}),
        ({"kind": "module", "function": "a:b"}, {"kind": "module", "function": "a:c"}),
        ({"kind": "module", "function": "a:b"}, npz("in/test.npz")),
    ],
)
def test_other_data_is_evaluated_on(trained: dict[str, Any], measured: dict[str, Any], folder: Path):
    preflight(apart(trained, measured), folder)


@pytest.mark.parametrize(("changes", "code"), UNUSABLE)
def test_what_could_not_be_used_later_is_refused_by_name(changes: dict[str, Any], code: str, tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        preflight(parse_config(GOOD | changes), tmp_path)
    assert refused.value.code == code
    assert list(tmp_path.iterdir()) == []


def test_what_can_be_used_is_connected_to_by_nobody(tmp_path: Path):
    ledger = {"url": "postgresql://127.0.0.1:1/none", "witness": url_file(tmp_path, "http://127.0.0.1:1/none")}
    preflight(parse_config(GOOD | {"ledger": ledger}), tmp_path)
    preflight(parse_config(GOOD | {"ledger": {"witness": str(tmp_path / "not-there-yet")}}), tmp_path)
    assert [str(path) for path in tmp_path.iterdir()] == [ledger["witness"]]


def test_the_trainer_and_the_plan_look_first(tmp_path: Path):
    settings = parse_config(GOOD | {"checkpoint": {"recipients": ["none.pub"]}})
    with pytest.raises(ConfigError, match=r"recipient: cannot read .*none\.pub"):
        Trainer(settings, config_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"recipient: cannot read .*none\.pub"):
        plan_of(settings, tmp_path)


def test_a_plan_has_a_tensor_for_each_aggregator(tmp_path: Path):
    with pytest.raises(ConfigError, match="aggregators: 5 aggregators cannot share 4 trainable tensors"):
        plan_of(parse_config(GOOD | {"aggregators": 5}), tmp_path)


def test_a_plan_tries_the_model_at_the_physical_size_of_the_run(tmp_path: Path):
    settings = config(model="tests.models:with_centred_batches", micro_batch_size=7)
    base = Path(worker_setup(settings, tmp_path).base)
    plan_of(settings, base)
    with pytest.raises(ModelError, match="mixing_layer"):
        plan_of(settings.model_copy(update={"micro_batch_size": 8}), base)


def test_a_plan_shows_the_bytes_on_each_gpu_of_a_worker(tmp_path: Path):
    on_gpus = GOOD | {"use_gpu": True}
    assert plan_of(parse_config(GOOD), tmp_path).gpu_bytes == ()
    # Four bytes a parameter, and eight for the sum.
    assert plan_of(parse_config(on_gpus), tmp_path).gpu_bytes == (12 * 4810,)
    plan = plan_of(parse_config(on_gpus | {"placement": {"resources_per_worker": {"GPU": 2}}}), tmp_path)
    # A hidden layer and an output layer.
    assert plan.gpu_bytes == (12 * 65 * 64, 12 * 65 * 10)
    assert dict(plan_rows(plan))["GPUs of a worker"].startswith("49.9 kB, 7.8 kB: parameters and sums")
    with pytest.raises(ModelError, match="unsplittable_model"):
        plan_of(parse_config(on_gpus | {"placement": {"resources_per_worker": {"GPU": 8}}}), tmp_path)
