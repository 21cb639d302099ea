"""A worker runs the code that the policy lists and no other, and refuses the rest by name before it opens data."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from raycloak.attestation.core.evidence import Presentation
from raycloak.attestation.core.messages import parse
from raycloak.metrics.errors import EvidenceError, ProtocolError, RaycloakError
from raycloak.workers.inputs.code_bundle import CodeBundle
from raycloak.workers.inputs.user_code import resolve
from raycloak.workers.listed_code import admit_code, check_code
from raycloak.workers.messages import Admission, WorkerSetup
from raycloak.workers.models.hub_model import HubSpec
from raycloak.workers.models.models import ModelSource
from raycloak.workers.terms.loss import LossSpec
from raycloak.workers.terms.manifest import Manifest, UserCode
from raycloak.workers.train_worker import TrainWorker
from tests.models import small_model
from tests.protocol import HandRun, config, worker_setup

pytestmark = pytest.mark.usefixtures("own_imports")

CODE = """
import numpy as np
import torch
from torch import nn
from bundled_rows import rows

def model():
    return nn.Linear(6, 3)

def loss(output, labels):
    return nn.functional.cross_entropy(output, labels, reduction="none")

class Rows:
    def __len__(self):
        return 40

    def batch(self, ids):
        return tuple(each[ids] for each in rows())

def data():
    return Rows()
"""
ROWS = """
import numpy as np

def rows():
    generator = np.random.default_rng(1)
    return generator.normal(size=(40, 6)).astype(np.float32), generator.integers(0, 3, 40)
"""
KINDS = {
    "model": {"model": ModelSource.of("bundled_code:model")},
    "loss": {"loss": LossSpec.of("bundled_code:loss"), "model": ModelSource.of("bundled_code:model")},
    "data": {"dataset": "bundled_code:data", "model": ModelSource.of("bundled_code:model")},
}


@pytest.fixture
def setup(tmp_path: Path) -> WorkerSetup:
    """Return the setup of a project with code of its own, without any list."""
    found = worker_setup(config(), tmp_path)
    Path(found.base, "bundled_code.py").write_text(CODE)
    Path(found.base, "bundled_rows.py").write_text(ROWS)
    return found


def with_code(setup: WorkerSetup, code: tuple[bytes, ...] | None, **fields) -> WorkerSetup:
    if isinstance(function := fields.get("dataset"), str):
        fields["dataset"] = setup.dataset.model_copy(update={"kind": "module", "path": None, "function": function})
    return setup.model_copy(update={"code": code, **fields})


def listing(setup: WorkerSetup) -> tuple[bytes, ...]:
    return (CodeBundle.read(setup.base).digest,)


def prepared(setup: WorkerSetup) -> bytes:
    """Return the bundle that a worker states once it has opened data, model and loss."""
    return TrainWorker("worker-0", None, lambda: 0.0).prepare(setup).code


def refusal(setup: WorkerSetup) -> RaycloakError:
    """Return why a worker refuses ``setup``, of which it has neither opened data nor executed code by then."""
    blind = setup.dataset.model_copy(update={"kind": "npz", "path": "absent.npz", "function": None})
    hidden = setup.dataset if setup.dataset.kind == "module" else blind
    with pytest.raises(RaycloakError) as caught:
        prepared(setup.model_copy(update={"dataset": hidden}))
    assert not {"bundled_code", "bundled_rows"} & set(sys.modules)
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
def test_guarantee_code_runs_in_a_worker_only_if_the_policy_lists_its_files(setup, kind):
    fields = KINDS[kind]
    for code in ((), (b"x" * 32,)):
        found = refusal(with_code(setup, code, **fields))
        assert (type(found), found.code) == (EvidenceError, "code_unlisted")
        named = fields["loss"].name if kind == "loss" else f"bundled_code:{kind}"
        assert named in found.message
        assert listing(setup)[0].hex() in found.message
    assert prepared(with_code(setup, (b"x" * 32, *listing(setup)), **fields)) == listing(setup)[0]
    assert "bundled_code" in sys.modules


def test_the_function_of_a_split_to_measure_on_is_code_of_the_run(setup):
    split = setup.dataset.model_copy(
        update={"kind": "module", "path": None, "function": "bundled_code:data", "public": True}
    )
    of_run = {"model": hub(setup, {}).model, "evaluation": split}
    found = refusal(with_code(setup, (b"x" * 32,), **of_run))
    assert (found.code, "bundled_code:data" in found.message) == ("code_unlisted", True)
    assert admit_code(with_code(setup, listing(setup), **of_run)) == listing(setup)[0]


@pytest.mark.parametrize("change", ["edited", "edited neighbour", "extra"])
def test_an_edited_or_an_extra_file_is_other_code(setup, change):
    listed = listing(setup)
    name = {"edited": "bundled_code.py", "edited neighbour": "bundled_rows.py", "extra": "extra.py"}[change]
    with Path(setup.base, name).open("a") as file:
        file.write("# more\n")
    found = refusal(with_code(setup, listed, **KINDS["model"]))
    assert found.code == "code_unlisted"
    assert prepared(with_code(setup, listing(setup), **KINDS["model"])) == listing(setup)[0]


def test_without_a_list_anything_runs_and_nothing_is_stated(setup):
    assert prepared(with_code(setup, None, **KINDS["model"])) == b""


@pytest.mark.parametrize(
    "fields",
    [{"model": "tests.models:small_model"}, {"loss": "torch:sum"}, {"dataset": "os:getcwd"}],
    ids=["model", "loss", "data"],
)
def test_an_installed_function_is_in_no_bundle(setup, fields):
    """Listed files may import it; a run may not name it, or it would name any function of any library."""
    made = {"model": ModelSource.of, "loss": LossSpec.of, "dataset": str}
    given = KINDS["model"] | {name: made[name](target) for name, target in fields.items()}
    assert refusal(with_code(setup, listing(setup), **given)).code == "code_unlisted"


def test_a_pickle_is_refused_by_name(setup):
    found = refusal(with_code(setup, listing(setup), model=ModelSource.of(small_model)))
    assert (found.code, "small_model" in found.message) == ("code_unlisted", True)


def hub(setup: WorkerSetup, files: dict[str, str], code: tuple[bytes, ...] = (), **fields) -> WorkerSetup:
    """Return a setup whose model is a folder of the Hugging Face hub with these files."""
    folder = Path(setup.base, "hub")
    folder.mkdir(exist_ok=True)
    for name, text in {"config.json": "{}", "model.safetensors": "", **files}.items():
        (folder / name).write_text(text)
    spec = HubSpec(hf="hub", task="causal_lm", **fields)
    return with_code(setup, code, model=ModelSource.of(spec))


def test_remote_code_is_refused_by_name(setup):
    code = {"config.json": json.dumps({"auto_map": {"AutoModel": "own.Own"}}), "own.py": ""}
    allowed = hub(setup, code, (*listing(setup), CodeBundle.read(Path(setup.base)).digest), allow_remote_code=True)
    found = refusal(allowed)
    assert (found.code, "hub with allow_remote_code" in found.message) == ("code_unlisted", True)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin", "model.pt", "model.pth", "weights.pkl"])
def test_pickled_weights_are_refused_by_name_even_beside_others(setup, name):
    found = refusal(hub(setup, {name: ""}))
    assert (found.code, name in found.message) == ("code_unlisted", True)


def test_a_hugging_face_model_with_built_in_loss_and_data_needs_no_entry(setup):
    """Unlisted files beside it are no matter, since nothing that is opened later can name them."""
    assert admit_code(hub(setup, {})) == b""
    with pytest.raises(EvidenceError, match="code_unlisted"):
        resolve("bundled_code:data", setup.base)


class ListedRun(HandRun):
    """A run of its own code, under a policy that lists it."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, model="bundled_code:model")

    def judged_by(self):
        base = self.home / "data"
        base.mkdir()
        (base / "bundled_code.py").write_text(CODE)
        (base / "bundled_rows.py").write_text(ROWS)
        policy, collateral = super().judged_by()
        return policy.model_copy(update={"code": (CodeBundle.read(base).digest,)}), collateral


def test_a_run_of_listed_code_trains_and_its_contract_and_evidence_state_the_code(tmp_path):
    hand = ListedRun(tmp_path)
    (listed,) = hand.policy.code
    assert hand.manifest.code == listed
    shown = {name: parse(Presentation, envelope.body).code for name, envelope in hand.presentations.items()}
    assert shown == dict.fromkeys([*hand.workers, "aggregator-0"], listed)
    hand.advance(hand.roster())


def changed(hand: HandRun, policy: dict[str, Any] | None = None, **manifest: Any) -> Admission:
    """Return the run's admission with another policy and manifest that agree with each other."""
    judged = hand.policy.model_copy(update=policy or {})
    stated = hand.manifest.model_copy(update={"policy_digest": judged.digest(), **manifest})
    return hand.admission.model_copy(update={"policy": judged, "manifest": stated})


def test_a_worker_presents_itself_for_no_other_list_and_no_other_code(tmp_path):
    """Whoever prepared it with a longer list, or with none, gets no evidence of it, and so no keys."""
    hand = ListedRun(tmp_path)
    (listed,) = hand.policy.code
    worker = hand.new_worker("worker-9")
    worker.prepare(hand.setup)
    worker.compute_known_answer(hand.mechanism, *hand.measurements)
    others = {
        "another list": (changed(hand, {"code": (b"x" * 32,)}), "policy_mismatch"),
        "a longer list": (changed(hand, {"code": (listed, b"x" * 32)}), "policy_mismatch"),
        "no list": (changed(hand, {"code": None}), "policy_mismatch"),
        "other code": (changed(hand, code=b"x" * 32), "manifest_mismatch"),
        "no code": (changed(hand, code=b""), "manifest_mismatch"),
    }
    for what, (given, code) in others.items():
        challenge = hand.orchestrator.challenge("worker-9", "worker")
        with pytest.raises(ProtocolError) as caught:
            worker.present(challenge.model_copy(update={"manifest_digest": given.manifest.digest()}), given)
        assert caught.value.code == code, what


def test_the_code_of_aggregators_and_driver_is_listed_too(tmp_path):
    """A worker that runs none itself demands that the contract says where it comes from."""
    hand = ListedRun(tmp_path)
    facts = hand.facts.model_copy(update={"code": b""})
    check_code(changed(hand, code=b""), hand.setup, facts)
    computation, own = hand.manifest.computation, {"code": b"c" * 32, "name": "bundled_code:Rule"}
    schedule = {"schedule_code": b"c" * 32, "schedule": "bundled_code:schedule"}
    elsewhere = {
        "bundled_code:Rule": {"optimizer": computation.optimizer.model_copy(update=own)},
        "bundled_code:schedule": {"optimizer": computation.optimizer.model_copy(update=schedule)},
        "bundled_code:metric": {"metrics": (UserCode(name="bundled_code:metric", source=b"c" * 32),)},
    }
    for name, fields in elsewhere.items():
        run = {"computation": computation.model_copy(update=fields)}
        check_code(changed(hand, **run), hand.setup, facts)
        for code, named in ((b"", name), (b"x" * 32, "78" * 32)):
            with pytest.raises(EvidenceError, match=f"code_unlisted.*{named}"):
                check_code(changed(hand, **run, code=code), hand.setup, facts)


def test_under_a_policy_without_a_list_a_contract_states_no_code(tmp_path):
    hand = HandRun(tmp_path)
    assert b'"code":' not in hand.policy.encode()
    assert json.loads(hand.manifest.encode()).keys() == Manifest.model_fields.keys() - {"code"}
    assert all(b'"code"' not in each.body for each in hand.presentations.values())
    with pytest.raises(ProtocolError, match="manifest_mismatch"):
        check_code(changed(hand, code=b"x" * 32), hand.setup, hand.facts)
