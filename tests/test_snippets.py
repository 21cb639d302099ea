"""Every snippet in README.md, docs/ and the READMEs of examples/ runs.

The ``python`` blocks of one document run in order as one program, so a later block may use the names of an earlier one;
tracebacks carry the document's line numbers. A document that uses Ray has a process of its own, which joins the
session's cluster by a plain ``ray.init()``. A ``yaml`` block is a file of another program (only parsed), an evidence
policy, settings of vaults, an evidence service, a training service, a whole configuration, or a part of one, which is
checked laid over the demo's. Every ``raycloak`` command line in a ``console`` or ``sh`` block names commands and
options that exist.
"""

import re
import runpy
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main
import yaml

from raycloak.attestation.policy.policy import load_policy
from raycloak.coordinator.cli.app import app
from raycloak.coordinator.config.run import parse_config
from raycloak.coordinator.config.section import validated
from raycloak.coordinator.evidence.standalone_service import ServiceConfig
from raycloak.coordinator.runs.demo import demo_config
from raycloak.coordinator.service.settings import ServiceSettings
from raycloak.coordinator.vaults.settings import ROLES
from raycloak.metrics.errors import ConfigError
from raycloak_lab.adapter.settings import AdapterSettings
from raycloak_lab.cli.app import app as lab_app

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("README.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*/README.md")])
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
ACTORS_OUTPUT = re.compile(r"(\x1b\[\d+m)?\(\w+ pid=")
DEADLINE_S = 900
FOREIGN = {"apiVersion", "scrape_configs"}
"""Keys that mark a file of Kubernetes, Grafana or Prometheus."""


@dataclass(frozen=True)
class Block:
    """One fenced block: ``line`` is the document's line number of its first line of content."""

    document: str
    line: int
    language: str
    body: str

    def __str__(self):
        return f"{self.document}:{self.line}"


def blocks_of(text, document):
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("body")) + 1
        indent = match["indent"]
        body = "".join(row.removeprefix(indent) for row in match["body"].splitlines(keepends=True))
        found.append(Block(document, line, match["language"], body))
    return found


BLOCKS = [block for path in DOCUMENTS for block in blocks_of(path.read_text(), str(path.relative_to(ROOT)))]


def _in(*languages):
    return [block for block in BLOCKS if block.language in languages]


def as_program(blocks):
    """Return the python blocks of a document as one source whose line numbers are the document's."""
    rows = []
    for block in blocks:
        rows += [""] * (block.line - 1 - len(rows)) + block.body.splitlines()
    return "\n".join(rows) + "\n"


# A pipeline, a search and a client, whose own tests run them as they are there: test_pipelines.py, test_tune.py and
# test_serve.py.
RUN_ELSEWHERE = {"docs/data.md", "docs/encrypted-adapters.md", "docs/tune.md"}


@pytest.mark.parametrize("document", sorted({block.document for block in _in("python")} - RUN_ELSEWHERE))
def test_python_blocks_run(document, run_python, request, monkeypatch):
    program = as_program([block for block in _in("python") if block.document == document])
    script = run_python.folder / Path(document).with_suffix(".py").name
    script.write_text(program)
    if not re.search(r"\bray\b", program):
        # In this process, which has imported the libraries that would cost a new one seconds.
        monkeypatch.chdir(script.parent)
        runpy.run_path(script.name, run_name="__main__")
        return
    environment = request.getfixturevalue("ray_cluster").environment
    done = run_python(script.name, environment=environment, deadline_s=DEADLINE_S)
    own = [row for row in done.stderr.splitlines() if not ACTORS_OUTPUT.match(row)]
    assert done.code == 0, "\n".join([document, *own[-40:]])


@pytest.mark.parametrize("block", _in("yaml", "yml"), ids=str)
def test_yaml_blocks_are_valid(block, tmp_path):
    check_yaml(block.body, tmp_path)


def check_yaml(body, folder):
    raw = yaml.safe_load(body)
    if FOREIGN & raw.keys():
        return
    if "accepted_classes" in raw:
        policy = folder / "policy.yaml"
        policy.write_text(body)
        load_policy(policy)
        return
    if "peer" in raw:
        # Its name, in the first line, tells whose settings they are.
        validated(ROLES[Path(body.splitlines()[0].split(",")[0].split()[1]).stem][0], raw)
        return
    if "tenants" in raw:
        validated(ServiceSettings, raw)
        return
    if "hosting" in raw:
        validated(ServiceConfig, raw)
        return
    if "tokens_of_client" in raw:
        validated(AdapterSettings, raw)
        return
    if "dp_config" in raw:
        parse_config(raw)
        return
    whole = demo_config()
    if "batch_size_per_worker" in raw:
        del whole["expected_batch_size"]
    parse_config({**whole, **raw})


@pytest.mark.parametrize("block", _in("console", "sh", "bash"), ids=str)
def test_command_lines_name_what_exists(block):
    for row in block.body.replace("\\\n", " ").splitlines():
        row = row.removeprefix("$ ")
        if row.split(" ")[0] in PROGRAMS:
            check_command_line(row)


PROGRAMS = {"raycloak": app, "raycloak-lab": lab_app}


def check_command_line(line):
    program, *words = shlex.split(line, comments=True)
    command = typer.main.get_command(PROGRAMS[program])
    for word in words:
        if word.startswith("-"):
            name = word.partition("=")[0]
            known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
            assert name in known, f"{line}: no option {name}"
        elif hasattr(command, "commands"):
            assert word in command.commands, f"{line}: no command {word}"
            command = command.commands[word]


def test_blocks_are_found_with_their_lines():
    text = "# Title\n\n```python\nx = 1\n```\n\n1. item\n\n   ```yaml\n   steps: 3\n   ```\n"
    assert blocks_of(text, "d.md") == [Block("d.md", 4, "python", "x = 1\n"), Block("d.md", 10, "yaml", "steps: 3\n")]


def test_a_program_keeps_the_documents_line_numbers():
    program = as_program([Block("d.md", 3, "python", "a\nb\n"), Block("d.md", 7, "python", "c\n")])
    assert program.splitlines() == ["", "", "a", "b", "", "", "c"]


@pytest.mark.parametrize(
    "body", ["steps: none\n", "no_such_field: 1\n", "dp_config: {}\n", "accepted_classes: [tdx]\n"]
)
def test_a_wrong_configuration_is_seen(body, tmp_path):
    with pytest.raises(ConfigError):
        check_yaml(body, tmp_path)


@pytest.mark.parametrize("line", ["raycloak train x.yaml", "raycloak run x.yaml --resumed", "raycloak bench mask"])
def test_a_wrong_command_line_is_seen(line):
    with pytest.raises(AssertionError, match=r"no (command|option)"):
        check_command_line(line)


def test_a_right_command_line_passes():
    check_command_line("raycloak run x.yaml --set dp_config.target_epsilon=4 --json  # comment")
