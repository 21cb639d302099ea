"""The page of a run: verdict first, in the words of the terminal, at whatever moment the run ended."""

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import matplotlib as mpl
import pytest

from raycloak.coordinator.console.figures import epsilon_text
from raycloak.coordinator.record.folder import RunFolder
from raycloak.coordinator.record.run_reader import read_run
from raycloak.coordinator.report.document import report_page, write_report
from raycloak.coordinator.report.facts import commands_of
from raycloak.coordinator.report.members import evidence_of
from raycloak.coordinator.report.words import verdict_rows
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.events import EventWriter

SECTIONS = ["verdict", "curves", "data", "evidence", "incidents", "reproduce", "limits"]


class Page(HTMLParser):
    """A page as a reader meets it: its texts, its ids and all that it refers to."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.ids, self.links, self._texts = [], [], [], []
        self.feed(page)
        self.close()

    @property
    def text(self):
        return " ".join(" ".join(self._texts).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href", "action", "data"):
                self.links.append(value)

    def handle_data(self, data):
        if self.tags[-1:] != ["style"]:
            self._texts.append(data)


def page_of(folder, **options):
    return Page(report_page(read_run(folder), **options))


def edit(folder, name, **changes):
    """Change fields of a JSON file of a run; a dotted name leads into it."""
    path = folder / name
    whole = json.loads(path.read_text())
    for field, value in changes.items():
        *parents, last = field.split("__")
        inner = whole
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    path.write_text(json.dumps(whole, sort_keys=True, separators=(",", ":")) + "\n")


def mark(folder, status):
    RunFolder.open(folder).mark(status)


def test_the_verdict_comes_first_in_the_words_of_the_terminal(ended):
    page = page_of(ended)
    assert [each for each in page.ids if each in SECTIONS] == SECTIONS
    assert "SIMULATED EVIDENCE" in page.text[: page.text.index("Curves")]
    verdict = read_run(ended).opened_verdict()
    for label, value in verdict_rows(verdict):
        assert f"{label} {' '.join(value.split())}" in page.text


def test_the_same_record_gives_the_same_bytes_whatever_the_users_own_figures_look_like(ended, tmp_path):
    first = write_report(ended, tmp_path / "one.html", eu_ai_act=True)
    with mpl.rc_context({"axes.linewidth": 7.0, "legend.borderpad": 3.0}):
        again = write_report(ended, tmp_path / "two.html", eu_ai_act=True)
        assert mpl.rcParams["axes.linewidth"] == 7.0
    assert first.read_bytes() == again.read_bytes()


def test_the_page_loads_nothing_and_runs_nothing(ended):
    page = page_of(ended, eu_ai_act=True)
    assert set(page.links) <= {f"#{each}" for each in page.ids}
    assert not {"script", "link", "iframe", "img", "object", "embed", "form"} & set(page.tags)
    assert len(page.ids) == len(set(page.ids))


def test_figures_show_what_the_record_has(ended):
    page = report_page(read_run(ended))
    titles = re.findall(r'<figure id="([^"]*)">', page)
    assert titles == ["epsilon", "accuracy", "loss", "class-counts", "phases", "members"]
    text = Page(page).text
    for label in ("charged to the account", "this run's plan", "public split", "private examples, noised (±2 σ)"):
        assert label in text
    charged = json.loads((ended / "verdict.json").read_text())["privacy_epsilon_charged"]
    # The last measurement is charged after the last step.
    assert f"After step 4 the account had been charged ε {epsilon_text(charged)}" in text
    assert {"ε at δ = 1e-05", "accuracy, %", "mean loss", "seconds a step", "workers"} <= set(
        re.findall(r"<text[^>]*>([^<]*)</text>", html.unescape(page))
    )


def test_members_and_incidents_are_those_of_the_log_and_the_events(ended):
    text = page_of(ended).text
    assert re.search(r"worker-1 worker SIMULATED .*? left: died", text)
    assert "aggregator-0-0 aggregator SIMULATED" in text
    assert re.search(r"member left code died metrics.jsonl", text)
    assert re.search(r"step repeated 2 attempts, charged once", text)
    assert "1 left, 1 joined later" in text


def test_every_text_of_the_record_is_escaped(copied):
    folder, attack = copied(), '"><script>alert(1)</script><img src=x>'
    edit(folder, "verdict.json", warnings=[attack], run_dir=f"/runs/{attack}", account=attack)
    edit(folder, "run.json", driver_base=f"/{attack}", secret_file=attack)
    events = folder / "metrics.jsonl"
    line = {"event": "departure", "time": 1.0, "code": attack}
    events.write_bytes(events.read_bytes() + json.dumps(line).encode() + b"\n")
    page = page_of(folder, eu_ai_act=True)
    assert not {"script", "img"} & set(page.tags)
    assert page.text.count("<script>alert(1)</script>") >= 5


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ("running", "the run is under way, or its process was killed"),
        ("failed", "the run failed before it finished a step"),
        ("void", "the run ended before anything was charged"),
    ],
)
def test_a_run_without_a_verdict_says_so_first_and_claims_nothing(copied, status, says):
    folder = copied()
    for name in ("verdict.json", "evidence.jsonl", "parameters.safetensors"):
        (folder / name).unlink()
    mark(folder, status)
    text = page_of(folder).text
    assert text.index("NO VERDICT") < text.index("Nothing is claimed for this run")
    assert says in text
    assert "There is no evidence log here" in text
    assert "it claims ε" not in text


def test_a_run_of_which_only_the_directory_was_made_has_a_page(copied):
    folder = copied()
    for name in ("verdict.json", "evidence.jsonl", "manifest.json", "metrics.jsonl", "measurements.json"):
        (folder / name).unlink()
    mark(folder, "void")
    page = page_of(folder, eu_ai_act=True)
    assert "NO VERDICT" in page.text
    assert "svg" not in page.tags


def test_the_verdict_of_an_earlier_execution_is_named_as_such(copied):
    folder = copied()
    with EventWriter(folder / "metrics.jsonl") as events:
        events.write("admitted", workers=3, evidence_class="simulated")
    mark(folder, "running")
    text = page_of(folder).text
    assert "VERDICT OF AN EARLIER EXECUTION" in text
    assert "The run has gone on since this verdict" in text
    assert "resumed execution 2" in text


def test_a_run_that_failed_names_its_code_and_how_to_resume_it(copied):
    folder = copied()
    edit(folder, "verdict.json", ending="min_workers", steps=2)
    mark(folder, "failed")
    text = page_of(folder).text
    assert "ended by the error min_workers" in text
    assert "--resume" in text


def test_a_run_that_is_not_private_says_so_everywhere(copied):
    folder = copied()
    nothing = dict.fromkeys(["privacy_epsilon", "privacy_epsilon_charged", "privacy_delta", "epsilon_cap", "data"])
    edit(folder, "verdict.json", private=False, **nothing)
    edit(folder, "manifest.json", computation__mechanism__private=False)
    page = page_of(folder, eu_ai_act=True)
    text = page.text
    assert text.count("NOT PRIVATE") >= 5
    assert text.index("NOT PRIVATE") < text.index("Verdict")
    assert "clipping norm" not in text
    assert "it claims ε" not in text
    assert "differential privacy of one example" not in text


def test_a_log_that_nobody_signed_so_is_not_shown(copied):
    folder = copied()
    log = folder / "evidence.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"worker-0"', b'"worker-9"'))
    text = page_of(folder).text
    assert "Nothing of it can be relied on. The evidence log is broken: entry" in text
    assert "worker-9" not in text


@pytest.mark.parametrize(("destroyed", "offered"), [(True, False), (False, True), (None, True)])
def test_replay_is_offered_only_where_the_secret_is_left(copied, destroyed, offered):
    folder = copied()
    edit(folder, "run.json", secret_file=None)
    run = read_run(folder)
    (command, needs) = {
        purpose: rest for purpose, *rest in commands_of(run, replace(evidence_of(run), secret_destroyed=destroyed))
    }["Compute steps again"]
    assert bool(command) is offered
    assert ("its secret was destroyed" in needs) is not offered


def test_a_verdict_of_another_version_is_refused_by_name(copied):
    folder = copied()
    edit(folder, "verdict.json", steps="many", unknown=1)
    whole = json.loads((folder / "verdict.json").read_text())
    del whole["account"], whole["private"]
    (folder / "verdict.json").write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match="no verdict of this version") as refusal:
        write_report(folder)
    assert refusal.value.code == "run_file"


def test_a_release_that_was_repeated_is_one_incident_though_it_has_many_values(copied):
    folder = copied()
    with EventWriter(folder / "metrics.jsonl") as events:
        for name in ("loss", "accuracy"):
            fields = {"query": "evaluation", "release": 7, "steps": 4, "value_name": name, "value": 0.5}
            events.write("measurement", **fields, noise_deviation=0.1, epsilon=1.0, attempts=3, seconds=1.0)
    assert page_of(folder).text.count("measurement repeated evaluation, 3 attempts, charged once") == 1
