"""The terms on which a worker's vault serves: places of data, noise, and who the run is of."""

from pathlib import Path
from typing import Any

import pytest

from raycloak.coordinator.vaults.served_terms import ServedTerms, located
from raycloak.coordinator.vaults.settings import WorkerSettings
from raycloak.metrics.errors import RefusedError
from raycloak.workers.inputs.descriptor import DatasetDescriptor
from raycloak.workers.messages import WorkerSetup
from raycloak.workers.models.models import ModelSource
from raycloak.workers.terms.loss import LossSpec
from raycloak.workers.terms.manifest import Manifest
from tests import protocol

LEDGER, POLICY = b"l" * 32, b"p" * 32
NOISE = 1.5


def terms(*places: dict) -> ServedTerms:
    paid = {"account": "patients", "least_noise": NOISE}
    data = tuple({**({} if each.get("public") else paid), **each} for each in places)
    settings = {
        "ledgers": (LEDGER.hex(),),
        "policies": (POLICY.hex(),),
        "code": "any",
        "socket": "/w.sock",
        "peer": "root",
    }
    return ServedTerms(WorkerSettings(**settings, data=data))


def setup(base: Path, path: str | None, kind: str = "npz", evaluation: str | None = None, **more) -> WorkerSetup:
    return WorkerSetup(
        model=ModelSource.of("tests.models:small_model"),
        loss=LossSpec.of("cross_entropy"),
        dataset=DatasetDescriptor(kind=kind, path=path, **more),
        base=str(base),
        seed=0,
        device="cpu",
        evaluation=DatasetDescriptor(kind="npz", path=evaluation, public=True) if evaluation is not None else None,
    )


def served(of: ServedTerms, *args, **more) -> str:
    """Return the place that data is found at."""
    return of.place_of(located(setup(*args, **more)).dataset).path


def refused(of: ServedTerms, *args, **more) -> str:
    with pytest.raises(RefusedError) as refusal:
        of.place_of(located(setup(*args, **more)).dataset)
    assert refusal.value.code == "data_not_served"
    return str(refusal.value)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Return a folder with data that is served, in `data`, and other data beside it."""
    for name in ("data", "data-2", "ray"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.npz").touch()
    return tmp_path


# --- places


def test_a_file_and_a_folder_serve_what_lies_there_however_it_is_named(folders):
    of = terms({"path": str(folders / "data")})
    (folders / "ray" / "link").symlink_to(folders / "data")
    for base, path in [
        (folders, "data"),
        (folders, "data/rows.npz"),
        (folders, "data/*.npz"),
        (folders / "ray", "../data/rows.npz"),
        (folders / "ray", "link/rows.npz"),
        (folders, str(folders / "data" / "rows.npz")),
    ]:
        assert served(of, base, path) == str(folders / "data")
    of = terms({"path": str(folders / "data" / "rows.npz")})
    assert served(of, folders, "data/rows.npz") == str(folders / "data" / "rows.npz")
    assert "rows.npz" not in refused(of, folders, "data")


def test_guarantee_data_outside_of_the_places_is_refused_however_it_is_named(folders):
    of = terms({"path": str(folders / "data")})
    (folders / "data" / "out").symlink_to(folders / "data-2")
    (folders / "ray" / "data").symlink_to(folders / "data-2")
    for base, path in [
        (folders, "data-2/rows.npz"),
        (folders, "."),
        (folders / "data", "../data-2/rows.npz"),
        (folders, "data/../data-2/*"),
        (folders, "data/out/rows.npz"),
        (folders / "ray", "data/rows.npz"),
        (folders, str(folders / "data-2")),
        (folders, "dat*/rows.npz"),
        (folders, f"file://{folders}/data/rows.npz"),
        (folders, f"{folders}/data/x://../../data-2/rows.npz"),
    ]:
        assert path.split("/")[0] in refused(of, base, path) or str(folders) in refused(of, base, path)


def test_guarantee_a_link_that_is_set_anew_after_the_check_leads_nowhere_else(folders):
    link = folders / "ray" / "link"
    link.symlink_to(folders / "data")
    checked = located(setup(folders / "ray", "link/rows.npz", evaluation="link"))
    link.unlink()
    link.symlink_to(folders / "data-2")
    assert checked.dataset.path == str(folders / "data" / "rows.npz")
    assert checked.evaluation is not None
    assert checked.evaluation.path == str(folders / "data")


def test_a_url_serves_what_lies_below_and_no_neighbour(tmp_path):
    of = terms({"path": "s3://b/data"}, {"path": "s3://b/abroad?region=eu-west-1"})
    for path in ("s3://b/data", "s3://b/data/", "s3://b/data/x.parquet", "s3://b/data/*.parquet"):
        assert served(of, tmp_path, path, "parquet") == "s3://b/data"
    assert served(of, tmp_path, "s3://b/abroad/x?region=eu-west-1", "parquet").startswith("s3://b/abroad")
    for path in (
        "s3://b/data-2/x.parquet",
        "s3://b/dat",
        "s3://b/data/../data-2/x.parquet",
        "s3://b/data/%2e%2e/data-2/x.parquet",
        "s3://b/data/x.parquet?endpoint_override=elsewhere",
        "s3://b/abroad/x",
        "s3://key:secret@b/data/x",
        "S3://b/data/x.parquet",
        "gs://b/data/x.parquet",
    ):
        assert path in refused(of, tmp_path, path, "parquet")


def test_a_kind_without_a_place_is_served_by_its_name_alone_and_whatever_path_it_has(tmp_path):
    of = terms({"path": "digits", "public": True}, {"path": str(tmp_path)})
    assert served(of, tmp_path, None, "digits") == "digits"
    assert "module" in refused(of, tmp_path, None, "module", function="a:b")
    assert "module" in refused(of, tmp_path, "rows.npz", "module", function="a:b")
    assert "npz" in refused(of, tmp_path, None, "npz")
    # The vaults work in the folder /.
    assert "/digits" in refused(of, Path("/"), "digits/rows.npz")


def test_the_file_of_an_audit_is_refused_since_it_names_other_files(tmp_path):
    of = terms({"path": str(tmp_path)})
    assert served(of, tmp_path, "rows.npz", "memory") == str(tmp_path)
    assert "canaries" in refused(of, tmp_path, "rows.npz", "canaries")


def test_private_data_is_not_served_as_public_and_public_data_is_as_either(tmp_path):
    of = terms({"path": str(tmp_path / "private")}, {"path": str(tmp_path / "public"), "public": True})
    assert "as private" in refused(of, tmp_path, "private/rows.npz", public=True)
    for public in (True, False):
        assert served(of, tmp_path, "public/rows.npz", public=public) == str(tmp_path / "public")


def test_an_evaluation_split_is_served_from_a_public_place_alone_since_its_results_are_exact(tmp_path):
    of = terms(
        {"path": str(tmp_path / "private")},
        {"path": str(tmp_path / "public"), "public": True},
        {"path": "digits", "public": True},
        {"path": "module"},
    )

    def measured(kind: str, path: str | None, **fields: Any) -> None:
        split = DatasetDescriptor(kind=kind, path=path, **fields)
        of_run = located(setup(tmp_path, "private/rows.npz").model_copy(update={"evaluation": split}))
        assert of_run.evaluation is not None
        of.require_public(of_run.evaluation)

    for kind in ("npz", "sealed"):
        measured(kind, "public/split", public=True)
    measured("digits", None, public=True)
    for kind, path, named in (
        ("npz", "private/split", "as private"),
        ("sealed", "private/split", "as private"),
        ("npz", "elsewhere", "elsewhere"),
        ("npz", "public/../private", "as private"),
        ("module", None, "as private"),
        ("canaries", "public/split", "canaries"),
    ):
        for public in (True, False):
            with pytest.raises(RefusedError, match="data_not_served") as refusal:
                measured(kind, path, public=public)
            assert named in str(refusal.value)


# --- noise, and the run


def test_guarantee_no_mechanism_with_less_noise_than_the_least_is_tried_on_private_data(tmp_path):
    of = terms({"path": str(tmp_path)}, {"path": "digits", "public": True})
    enough, little = (protocol.mechanism(noise_multiplier=each) for each in (NOISE, NOISE * 0.999))
    with pytest.raises(RefusedError, match="data_not_served"):
        of.require_noise(enough)
    of.place = of.place_of(located(setup(tmp_path, "rows.npz")).dataset)
    of.require_noise(enough, enough)
    for mechanisms in ((little,), (enough, little)):
        with pytest.raises(RefusedError, match=r"noise_not_served.*1\.4985 is below 1\.5"):
            of.require_noise(*mechanisms)
    of.place = of.place_of(located(setup(tmp_path, None, "digits")).dataset)
    of.require_noise(little)


def manifest(**changes) -> Manifest:
    values = {"ledger_key": LEDGER, "account": "patients", "policy_digest": POLICY}
    return Manifest.model_construct(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"ledger_key": b"x" * 32}, "ledger_not_served"),
        ({"account": "other"}, "account_not_served"),
        ({"policy_digest": b"x" * 32}, "policy_not_served"),
    ],
)
def test_a_run_of_another_ledger_account_or_policy_is_refused(tmp_path, changes, code):
    of = terms({"path": str(tmp_path)})
    with pytest.raises(RefusedError, match="data_not_served"):
        of.require_manifest(manifest())
    of.place = of.place_of(located(setup(tmp_path, "rows.npz")).dataset)
    of.require_manifest(manifest())
    with pytest.raises(RefusedError, match=code):
        of.require_manifest(manifest(**changes))


def test_public_data_needs_no_account_and_still_a_ledger_and_a_policy(tmp_path):
    of = terms({"path": str(tmp_path), "public": True})
    of.place = of.place_of(located(setup(tmp_path, "rows.npz")).dataset)
    of.require_manifest(manifest(account="any"))
    with pytest.raises(RefusedError, match="ledger_not_served"):
        of.require_manifest(manifest(ledger_key=b"x" * 32))
    with pytest.raises(RefusedError, match="policy_not_served"):
        of.require_manifest(manifest(policy_digest=b"x" * 32))
