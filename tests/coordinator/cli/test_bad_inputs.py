"""The corpus of bad inputs: each is answered with its exit code, its code and its message, in one line, at no cost."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from raycloak.coordinator.cli import app
from raycloak.coordinator.console.output import Output
from raycloak.metrics.errors import RaycloakError
from tests.coordinator.cli.bad_input_files import make_folder

CORPUS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("bad_inputs.yaml").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bad")
    make_folder(made)
    return made


def given(case: dict[str, Any]) -> str:
    return " ".join(case.get("set") or case.get("arguments") or [repr(case.get("text"))])


def arguments(case: dict[str, Any], folder: Path) -> list[str]:
    if "arguments" in case:
        return [str(folder / "config.yaml") if word == "CONFIG" else word for word in case["arguments"]]
    if "text" in case:
        (folder / "given.yaml").write_text(case["text"])
        return ["plan", "given.yaml"]
    return ["plan", str(folder / "config.yaml"), *(word for each in case["set"] for word in ("--set", each))]


@pytest.fixture
def answered(folder: Path, raycloak_home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Return what tries a case of the corpus."""
    said: list[RaycloakError] = []
    say = Output._say

    def remember(output: Output, error: RaycloakError) -> None:
        said.append(error)
        say(output, error)

    monkeypatch.setattr(Output, "_say", remember)
    monkeypatch.setattr(app, "leave_stdout", lambda: None)
    monkeypatch.chdir(folder)

    def answer(case: dict[str, Any]) -> None:
        words = arguments(case, folder)
        with pytest.raises(SystemExit) as stopped:
            app.main(words)
        out, err = capfd.readouterr()
        (error,) = said
        message = error.message.replace(str(raycloak_home), "HOME").replace(str(folder), "FOLDER")
        assert (stopped.value.code, error.code) == (case["exit"], case["code"])
        assert case["says"] in message
        assert out == ""
        *progress, line = err.splitlines()
        assert line.startswith(f"error: {case['code']}: ")
        assert not progress or words[0] in ("run", "audit")
        assert error.remedy
        if words[0] in ("plan", "run"):
            assert not (raycloak_home / "ledger.sqlite").exists()

    return answer


@pytest.mark.parametrize("case", [case for case in CORPUS if "slow" not in case], ids=given)
def test_a_bad_input_is_answered_by_name(case: dict[str, Any], answered):
    answered(case)


@pytest.mark.parametrize("case", [case for case in CORPUS if "slow" in case], ids=given)
def test_a_bad_input_that_takes_longer_is_answered_by_name(case: dict[str, Any], answered):
    answered(case)


def test_the_corpus_only_grows():
    assert len(CORPUS) >= 250
    assert len({given(case) for case in CORPUS}) == len(CORPUS)
