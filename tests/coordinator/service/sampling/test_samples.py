"""Samples from sealed packages: of the run they are asked for, released, and by nobody else's key."""

import queue
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from raycloak.coordinator.checkpoints.archive import Archive
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.config.sections import CheckpointConfig
from raycloak.coordinator.record.folder import RunFolder
from raycloak.coordinator.service.sampling.sampler import Sampler, SamplerLimits, service_recipient
from raycloak.coordinator.training.assignment import NewRun
from tests.protocol import RENYI, trained
from tests.tiny_text import write_gpt2

DEADLINE_S = 300
REQUEST = wire.Sample(prompts=["the film", "a"], max_tokens=5, temperature=0.8, top_p=1.0, seed=3, completions=2)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A run of a small GPT-2 that sealed each of its two steps to the service; returns folder, run and packages."""
    home = tmp_path_factory.mktemp("site")
    write_gpt2(home / "gpt2", n_layer=1)
    (home / "plot.txt").write_text("the film was very fine a plot is dull\n" * 36)
    public = service_recipient(home / "service")
    settings = CheckpointConfig(storage="packages", recipients=[str(public)], checkpoint_frequency=1, num_to_keep=2)
    run = trained(
        home,
        model={"hf": str(home / "gpt2"), "task": "causal_lm"},
        dataset={"kind": "text_blocks", "path": str(home / "plot.txt"), "max_length": 8},
        steps=2,
        micro_batch_size=8,
        dp_config=RENYI,
        assignment=NewRun(Archive(settings, "0" * 16, home, lambda line: None)),
    )
    # No test has a state folder yet.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYCLOAK_HOME", str(home))
        folder = RunFolder.create(run.config, run.session.run_id, str(run.home), None)
    shutil.copy2(run.folder / "manifest.json", folder.path)
    return home, folder.path, sorted((home / "packages").rglob("*.tssp"))


class Told:
    """What a sampler says of its samples."""

    def __init__(self) -> None:
        self.outcomes = queue.Queue()
        self.text = {}
        self.rates = []

    def on_tokens(self, name, completion, text):
        key = name, completion
        self.text[key] = self.text.get(key, "") + text

    def on_rate(self, name, tokens_per_second):
        self.rates.append((name, tokens_per_second))

    def on_done(self, name, completions, cause):
        self.outcomes.put((name, completions, cause))


@pytest.fixture
def samples(site, tmp_path):
    """Return a maker of samplers over a copy of the service's folder, and what they say."""
    folder, told, made = tmp_path / "service", Told(), []
    shutil.copytree(site[0] / "service", folder)

    def make(signer=site[0] / "signer" / "signer.pub.json"):
        made.append(Sampler(SamplerLimits(), folder, signer, told.on_tokens, told.on_rate, told.on_done))
        return made[-1]

    yield make, told, folder
    for each in made:
        each.close()
    assert list((folder / "sampled").iterdir()) == []


def test_packages_are_sampled_one_after_the_other_and_a_copy_if_it_has_the_digest_of_its_name(site, samples, tmp_path):
    _, run, packages = site
    assert len(packages) == 2
    make, told, folder = samples
    (folder / "sampled").mkdir()
    (folder / "sampled" / "left").touch()
    service = make()
    for name, package in enumerate(packages):
        service.submit(f"c.{name}", "north", str(package), str(run), REQUEST)
    for name in range(2):
        operation, completions, cause = told.outcomes.get(timeout=DEADLINE_S)
        assert (operation, cause) == (f"c.{name}", None)
        assert [each.prompt for each in completions] == [0, 0, 1, 1]
        assert [told.text.get((operation, place), "") for place in range(4)] == [each.text for each in completions]
    assert [name for name, _ in told.rates] == sorted(name for name, _ in told.rates)
    assert {name for name, rate in told.rates if rate > 0} == {"c.0", "c.1"}
    # The newest weights stay open for the next sample; nobody else can read them.
    (opened,) = (folder / "sampled").iterdir()
    assert opened.stat().st_mode & 0o777 == 0o600
    assert set(load_file(opened)) == {each.name for each in RunFolder.open(run).manifest().computation.tensors}

    right = tmp_path / f"{opened.stem.rpartition('-')[2]}.safetensors"
    wrong = tmp_path / f"{'0' * 64}.safetensors"
    for copy in (right, wrong):
        shutil.copy2(opened, copy)
    service.submit("c.2", "north", str(right), str(run), REQUEST)
    assert told.outcomes.get(timeout=DEADLINE_S) == ("c.2", completions, None)
    service.submit("c.3", "north", str(wrong), str(run), REQUEST)
    _, completions, cause = told.outcomes.get(timeout=DEADLINE_S)
    assert (completions, cause.code) == ([], "weights_changed")
    # They are who made them's to remove.
    assert right.exists()
    assert wrong.exists()


def refused(service, told, package, run):
    service.submit("c.0", "north", str(package), str(run), REQUEST)
    _, completions, cause = told.outcomes.get(timeout=DEADLINE_S)
    assert completions == []
    return cause.code


def test_a_package_that_was_changed_or_is_another_runs_is_refused(site, samples, tmp_path):
    _, run, packages = site
    make, told, _ = samples
    service = make()
    changed = shutil.copytree(packages[1], tmp_path / packages[1].name)
    payload = changed / "parameters.bin"
    path = payload if payload.exists() else max(changed.iterdir(), key=lambda each: each.stat().st_size)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert refused(service, told, changed, run) == "package_file_changed"
    assert refused(service, told, tmp_path / "none.tssp", run).startswith(("storage", "package"))
    other = shutil.copytree(run, tmp_path / "other")
    manifest = RunFolder.open(run).manifest()
    RunFolder.open(other).write_manifest(manifest.model_copy(update={"run_id": "f" * 16}))
    assert refused(service, told, packages[1], other) == "package_other_run"
    (other / "manifest.json").unlink()
    assert refused(service, told, packages[1], other) == "no_weights"


def test_a_package_of_another_signer_or_to_another_recipient_is_refused(site, samples, tmp_path):
    _, run, packages = site
    make, told, folder = samples
    assert refused(make(tmp_path / "signer.pub.json"), told, packages[1], run) == "signer"
    for file in folder.glob("training-service.key*"):
        file.unlink()
    assert service_recipient(folder) == service_recipient(folder)
    assert refused(make(), told, packages[1], run) == "not_a_recipient"


def test_a_sample_can_be_cancelled_at_any_time(site, samples):
    _, run, packages = site
    make, told, _ = samples
    service = make()
    service.submit("c.0", "north", str(packages[1]), str(run), REQUEST)
    service.cancel("c.0")
    service.cancel("c.0")
    service.cancel("c.1")
    name, completions, cause = told.outcomes.get(timeout=DEADLINE_S)
    assert (name, completions, cause.kind) == ("c.0", [], "cancelled")


def test_the_key_is_the_services_alone(tmp_path):
    public = service_recipient(tmp_path / "service")
    assert Path(str(public).removesuffix(".pub")).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "service").stat().st_mode & 0o777 == 0o700
