"""The owner's check counts what would spoil a run, and a run knows that this very data passed it."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycloak.attestation.sealed.demand import SealedDemand
from raycloak.coordinator.config import home
from raycloak.coordinator.config.run import RunConfig, parse_config
from raycloak.coordinator.planning.data_check import DataReport, UnitReport, check_data, recorded_check
from raycloak.coordinator.planning.dry_run import plan_of
from raycloak.coordinator.planning.model_source import model_source
from raycloak.coordinator.planning.references import descriptor
from raycloak.coordinator.planning.sealing import SealTerms, seal_for
from raycloak.metrics.errors import ConfigError, DatasetError, ModelError
from raycloak.workers.inputs import text_data
from raycloak.workers.messages import WorkerSetup
from raycloak.workers.models.models import ModelSource
from raycloak.workers.terms.loss import LossSpec
from tests.protocol import open_workload
from tests.tiny_text import write_tokenizer

CLEAN = {
    "examples": 60,
    "feature_shape": (4,),
    "feature_dtype": "float32",
    "label_shape": (),
    "label_dtype": "int64",
    "features": ("images",),
    "left_out": (),
    "not_finite": 0,
    "not_finite_shown": (),
    "not_finite_columns": (),
    "label_range": (0, 2),
    "classes": 3,
    "labels_outside": 0,
    "labels_outside_shown": (),
    "vocabulary": None,
    "ids_outside": 0,
    "ids_outside_shown": (),
    "duplicates": 0,
    "evaluation_overlap": None,
    "constant_features": 0,
    "constant_shown": (),
    "cut": None,
    "turned": None,
    "several_frames": None,
    "allow_void": False,
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(
        "from torch import nn\n\ndef linear():\n    return nn.Linear(4, 3)\n\n"
        "def loss(out, labels):\n    return (out.sum(1) - labels) ** 2\n"
    )
    (tmp_path / "data.key").touch(mode=0o600)
    (tmp_path / "data.key").write_text("0f" * 32)
    return tmp_path


def examples() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(8).normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3


def configured(base: Path, features: np.ndarray, labels: np.ndarray, **fields: Any) -> RunConfig:
    np.savez(base / "data.npz", images=features, labels=labels)
    raw = {
        "expected_batch_size": 20,
        "steps": 3,
        "model": "models:linear",
        "dataset": {"kind": "npz", "path": "data.npz", "fingerprint_key": "data.key"},
        "dp_config": {"noise_multiplier": 2.0, "epsilon_cap": 20.0},
    }
    return parse_config({**raw, **fields})


def report(base: Path, features: np.ndarray, labels: np.ndarray, **fields: Any) -> DataReport:
    return check_data(configured(base, features, labels, **fields), base).report


def test_clean_data_has_no_finding(base: Path):
    found = report(base, *examples())
    assert found == DataReport(**CLEAN)
    assert (found.problems, found.cautions) == ((), ())


def test_values_that_are_not_finite_are_counted_by_example(base: Path):
    features, labels = examples()
    features[3, :2], features[59, 3] = np.nan, np.inf
    found = report(base, features, labels)
    assert found == replace(DataReport(**CLEAN), not_finite=2, not_finite_shown=(4, 60))
    assert "with a value that is NaN or infinite: 2." in found.problems[0]
    targets = np.where(np.arange(60) == 7, np.nan, 1.5)
    found = report(base, examples()[0], targets, loss="mse")
    assert (found.not_finite, found.label_range, found.classes) == (1, (1.5, 1.5), None)


def test_labels_outside_the_models_outputs_or_the_declared_classes_are_counted(base: Path):
    features, labels = examples()
    labels[[4, 50]] = 3, -1
    found = report(base, features, labels)
    assert (found.labels_outside, found.labels_outside_shown, found.label_range) == (2, (5, 51), (-1, 3))
    assert "with a label outside 0 .. 2: 2." in found.problems[0]
    labels[50] = 2
    dataset = {"kind": "npz", "path": "data.npz", "classes": 2}
    assert report(base, features, labels, dataset=dataset).labels_outside == 21
    with pytest.raises(ConfigError, match="labels_beyond_head: the data has 4 classes, and the model outputs for 3"):
        report(base, features, labels, dataset={**dataset, "classes": 4})
    # What a loss of the user's own takes for a class is not known.
    own = {"loss": "models:loss", "dataset": {**dataset, "classes": 4}}
    assert report(base, features, labels, **own).labels_outside == 0
    # Without a model nobody knows how many there are.
    assert report(base, features, labels, model=None).classes is None


def test_duplicates_are_those_that_equal_an_earlier_example_in_features_and_label(base: Path):
    features, labels = examples()
    features[[10, 20, 30]] = features[0]
    labels[[0, 10, 20, 30]] = 1, 1, 1, 2
    found = report(base, features, labels)
    assert (found.duplicates, found.problems) == (2, ())
    assert "equal an earlier one: 2." in found.cautions[0]


def test_the_overlap_with_the_evaluation_split_is_by_features(base: Path):
    features, labels = examples()
    np.savez(base / "test.npz", images=np.concatenate([features[:5], features[:9] + 1]), labels=np.zeros(14, int))
    split = {"dataset": {"kind": "npz", "path": "test.npz", "public": True}}
    found = report(base, features, labels, evaluation=split)
    assert (found.evaluation_overlap, len(found.cautions)) == (5, 1)


def test_constant_features_are_named_by_their_position(base: Path):
    features, labels = examples()
    features[:, [1, 3]] = 7, np.nan
    found = report(base, features, labels)
    assert (found.constant_features, found.constant_shown, found.not_finite) == (2, (1, 3), 60)


def test_texts_beyond_the_length_and_ids_beyond_the_vocabulary_are_counted(base: Path, monkeypatch):
    monkeypatch.setattr(text_data, "_CHUNK", 2)
    write_tokenizer(base / "words")
    texts = ["good film", "a very very good film", "bad", "a a a a", "not good"]
    (base / "train.tsv").write_text("".join(f"{text}\t{number % 2}\n" for number, text in enumerate(texts)))
    dataset = {"kind": "text", "path": "train.tsv", "tokenizer": "words", "max_length": 5, "classes": 2}
    found = report(base, *examples(), dataset=dataset, model=None)
    assert (found.cut, found.ids_outside, found.vocabulary, found.labels_outside) == (2, 0, 16, 0)
    ids = np.tile(np.arange(4), (60, 1))
    ids[5, 2], ids[9, 3], ids[11, 1] = 9, -2, -1
    dataset = {"kind": "npz", "path": "data.npz", "vocabulary": 9}
    found = report(base, ids, examples()[1], dataset=dataset, model=None)
    assert (found.ids_outside, found.ids_outside_shown, found.duplicates) == (2, (6, 10), 54)
    assert "outside 0 .. 8" in found.problems[0]


def test_a_recorded_check_is_of_the_data_that_it_is_found_by(base: Path):
    config = configured(base, *examples())
    assert plan_of(config, base).data_check is None
    checked = check_data(config, base)
    assert len(checked.digest) == 32
    assert recorded_check(checked.fingerprint) == checked.digest.hex() == plan_of(config, base).data_check
    assert home.check_file(checked.fingerprint).parent.stat().st_mode & 0o777 == 0o700
    features, labels = examples()
    features[0, 0] += 1
    changed = configured(base, features, labels)
    assert plan_of(changed, base).data_check is None


def test_a_check_that_finds_a_problem_is_not_recorded_and_neither_is_one_without_a_key(base: Path):
    features, labels = examples()
    features[1, 1] = np.nan
    assert check_data(configured(base, features, labels), base).digest == b""
    unkeyed = configured(base, *examples(), dataset={"kind": "npz", "path": "data.npz"})
    assert check_data(unkeyed, base).digest == b""
    assert not (home.home() / "checks").exists()


def test_the_digest_of_a_check_depends_on_the_key(base: Path):
    config = configured(base, *examples())
    first = check_data(config, base).digest
    assert check_data(config, base).digest == first
    (base / "data.key").write_text("0e" * 32)
    assert check_data(config, base).digest != first


def test_a_configuration_without_data_is_refused(base: Path):
    with pytest.raises(ConfigError, match="config: a check needs a dataset"):
        check_data(configured(base, *examples(), dataset=None), base)


def test_an_owner_who_allows_void_examples_has_them_counted_as_a_caution(base: Path):
    features, labels = examples()
    features[3, 0] = np.nan
    dataset = {"kind": "npz", "path": "data.npz", "allow_void": True}
    found = report(base, features, labels, dataset=dataset)
    assert found.problems == ()
    assert "NaN or infinite: 1. They would get no gradient. dataset.allow_void accepts them." in found.cautions[0]
    assert plan_of(configured(base, features, labels, dataset=dataset), base).features == "[4] float32: images"
    with pytest.raises(DatasetError, match="dataset_void"):
        plan_of(configured(base, features, labels), base)


def write_table(base: Path, name: str, header: str = "row,a,b,c,y") -> None:
    rows = np.random.default_rng(3).normal(size=(60, 3)).round(3)
    lines = [f"{number},{','.join(map(str, row))},{number % 3}" for number, row in enumerate(rows.tolist())]
    (base / name).write_text("\n".join([header, *lines]))


def test_the_features_are_named_and_what_is_left_out_of_them_too(base: Path):
    write_table(base, "train.csv", header=",a,b,c,y")
    (base / "models.py").write_text("from torch import nn\n\ndef linear():\n    return nn.Linear(3, 3)\n")
    dataset = {"kind": "csv", "path": "train.csv", "labels": "y"}
    config = configured(base, *examples(), dataset=dataset)
    checked = check_data(config, base)
    assert (checked.features, checked.report.features) == ("[3] float32: a, b, c", ("a", "b", "c"))
    (left_out,) = checked.report.left_out
    assert "the first column is left out" in left_out
    assert any(left_out in caution for caution in checked.report.cautions)
    plan = plan_of(config, base)
    assert plan.features == "[3] float32: a, b, c"
    assert any(left_out in warning for warning in plan.warnings)
    assert plan.as_json()["features"] == plan.features
    # A model that wants the column too is told which ones there are.
    (base / "models.py").write_text("from torch import nn\n\ndef linear():\n    return nn.Linear(4, 3)\n")
    told = r"model_input: .*The features are \[3\] float32: a, b, c; the first column is left out"
    setup = WorkerSetup(
        model=ModelSource.of("models:linear"),
        loss=LossSpec.of("cross_entropy"),
        dataset=descriptor(config.dataset),
        base=str(base),
        seed=0,
        device="cpu",
    )
    for door in (lambda: plan_of(config, base), lambda: check_data(config, base), lambda: open_workload(setup)):
        with pytest.raises(ModelError, match=told):
            door()


def test_a_split_of_other_columns_than_the_training_data_is_refused(base: Path):
    write_table(base, "train.csv")
    write_table(base, "test.csv", header="row,a,c,b,y")
    split = {"kind": "csv", "path": "test.csv", "labels": "y", "public": True}
    config = configured(
        base,
        *examples(),
        dataset={"kind": "csv", "path": "train.csv", "labels": "y"},
        evaluation={"dataset": split},
    )
    with pytest.raises(DatasetError, match="has the feature 'c' where the training data has 'b'"):
        plan_of(config, base)


def test_columns_with_values_that_are_not_finite_are_named_with_their_rows(base: Path):
    (base / "train.csv").write_text("a,b,c,d,y\n1,2,3,4,0\n1,nan,3,4,1\n1,2,3,,1\n1,,3,4,0\n")
    found = report(base, *examples(), dataset={"kind": "csv", "path": "train.csv", "labels": "y"})
    assert (found.not_finite, found.not_finite_shown, found.not_finite_columns) == (3, (2, 3, 4), ("b", "d"))
    assert "NaN or infinite in b, d: 3." in found.problems[0]


def test_the_labels_of_pixels_are_a_form_like_any_other(base: Path):
    images, masks = np.zeros((60, 4, 2, 2), np.float32), np.arange(240).reshape(60, 2, 2) % 3
    (base / "models.py").write_text("from torch import nn\n\ndef linear():\n    return nn.Conv2d(4, 3, 1)\n")
    config = configured(base, images, masks)
    found = check_data(config, base).report
    assert (found.label_shape, found.classes, found.labels_outside) == ((2, 2), 3, 0)
    assert plan_of(config, base).mechanism.num_examples == 60


def test_what_is_ignored_in_images_is_counted(base: Path):
    image_module = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    for name in ("cat", "dog"):
        (base / "photos" / name).mkdir(parents=True)
    plain = image_module.new("RGB", (4, 4))
    for number, orientation in enumerate((None, 0, 1, 6, 3)):
        tags = image_module.Exif()
        if orientation is not None:
            tags[0x0112] = orientation
        plain.save(base / "photos" / "cat" / f"{number}.jpg", exif=tags)
    plain.save(base / "photos" / "dog" / "one.gif")
    plain.save(
        base / "photos" / "dog" / "two.gif", save_all=True, append_images=[image_module.new("RGB", (4, 4), "red")]
    )
    dataset = {"kind": "imagefolder", "path": "photos", "size": [4, 4]}
    found = report(base, *examples(), dataset=dataset, model=None)
    assert (found.turned, found.several_frames) == (2, 1)
    assert any(each.startswith("Images with an EXIF tag that turns them: 2.") for each in found.cautions)
    assert any(each.startswith("Images of several frames or pages: 1.") for each in found.cautions)


WHOSE = np.repeat(np.arange(8), [1, 1, 2, 2, 2, 3, 9, 40])


def of_patients(base: Path, whose: np.ndarray, **fields: Any) -> DataReport:
    """Report on the examples, the rows of which are of the patients ``whose``."""
    features, labels = examples()
    config = configured(
        base,
        features,
        labels,
        dataset={"kind": "npz", "path": "data.npz", "unit": "patient", "rows_per_unit": 2, **fields},
        evaluation={"dataset": {"kind": "npz", "path": "test.npz", "public": True, "unit": "patient"}},
    )
    np.savez(base / "data.npz", images=features, labels=labels, patient=whose)
    return check_data(config, base).report


def test_rows_of_a_unit_are_counted_and_those_that_k_cuts_away(base: Path):
    features, labels = examples()
    np.savez(base / "test.npz", images=features[:3] + 1, labels=labels[:3], patient=np.array([100, 101, 102]))
    found = of_patients(base, WHOSE)
    assert found.units == UnitReport("patient", 8, 2, rows=(1, 2, 40, 40, 40), beyond=1 + 7 + 38, evaluated=0)
    assert found.problems == ()
    assert "One patient has 40 of 60 rows, and 2 in a step." in found.cautions
    assert of_patients(base, np.arange(60)).cautions == (
        "Every patient has one row: it protects what an example does.",
    )


def test_a_unit_in_both_splits_is_a_problem(base: Path):
    features, labels = examples()
    np.savez(base / "test.npz", images=features[:3] + 1, labels=labels[:3], patient=np.array([6, 101, 7]))
    found = of_patients(base, WHOSE)
    assert found.problems == ("Of patient with rows in both splits: 2. Split the data by it.",)


def test_a_unit_in_both_splits_is_refused_where_either_is_sealed(base: Path):
    features, labels = examples()
    config = configured(
        base,
        features,
        labels,
        dataset={"kind": "npz", "path": "data.npz", "unit": "patient", "rows_per_unit": 2},
        evaluation={"dataset": {"kind": "npz", "path": "test.npz", "public": True, "unit": "patient"}},
        virtual_workers=4,
    )
    np.savez(base / "data.npz", images=features, labels=labels, patient=WHOSE)
    terms = SealTerms("training", SealedDemand(ledger_key=bytes(32), account="a", least_noise_multiplier=1.0))
    for evaluated, refused in ((7, True), (8, False)):
        whose = np.array([evaluated, 100, 101, 102])
        np.savez(base / "test.npz", images=features[:4] + 1, labels=labels[:4], patient=whose)
        for sealed_for in (terms, SealTerms("evaluation", None)):
            out = base / f"{sealed_for.use}-{evaluated}"
            with pytest.raises(DatasetError, match="unit_in_both") if refused else nullcontext():
                seal_for(config, base, base / "key", out, sealed_for)
            assert out.exists() is not refused


def test_data_whose_persons_have_one_row_each_is_told_by_the_plan(base: Path):
    features, labels = examples()
    config = configured(
        base,
        features,
        labels,
        dataset={"kind": "npz", "path": "data.npz", "unit": "patient", "rows_per_unit": 2},
        expected_batch_size=2,
        virtual_workers=4,
    )
    for whose, said in ((np.arange(60), 1), (WHOSE, 0)):
        np.savez(base / "data.npz", images=features, labels=labels, patient=whose)
        warnings = plan_of(config, base).warnings
        assert len([each for each in warnings if each.startswith("every patient has one row")]) == said


def test_a_unit_in_both_splits_is_refused_by_the_plan_and_by_a_worker(base: Path):
    features, labels = examples()
    split = {"kind": "npz", "path": "test.npz", "public": True, "unit": "patient"}
    config = configured(
        base,
        features,
        labels,
        dataset={"kind": "npz", "path": "data.npz", "unit": "patient", "rows_per_unit": 2},
        evaluation={"dataset": split},
        expected_batch_size=2,
        virtual_workers=4,
    )
    np.savez(base / "data.npz", images=features, labels=labels, patient=WHOSE)
    assert config.dataset is not None
    assert config.evaluation is not None
    for evaluated, code in ((7, "unit_in_both"), (8, None)):
        np.savez(base / "test.npz", images=features[:1] + 1, labels=labels[:1], patient=np.array([evaluated]))
        setup = WorkerSetup(
            model=model_source(config.model),
            loss=LossSpec.of("cross_entropy"),
            dataset=descriptor(config.dataset),
            base=str(base),
            seed=0,
            device="cpu",
            evaluation=descriptor(config.evaluation.dataset),
        )
        for tried in (partial(plan_of, config, base), partial(open_workload, setup)):
            if code is None:
                tried()
                continue
            with pytest.raises(DatasetError) as refusal:
                tried()
            assert refusal.value.code == code
            assert "7" not in refusal.value.message
