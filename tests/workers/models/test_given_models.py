"""A model's function that a program gives is found by workers where the program finds it, or the module is named."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from raycloak.metrics.errors import ConfigError
from raycloak.workers.models.models import ModelSource, build_model

NETS = "import layers_of_ours\n\ndef small():\n    return layers_of_ours.linear()\n"
LAYERS = "from torch import nn\n\ndef linear():\n    return nn.Linear(3, 2)\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelSource]:
    """Yield the source of a function in a folder that the program, as a notebook does, adds to its path."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "nets_of_ours.py").write_text(NETS)
    (tmp_path / "src" / "layers_of_ours.py").write_text(LAYERS)
    with monkeypatch.context() as driver:
        driver.setattr(sys, "path", [str(tmp_path / "src"), *sys.path])
        import nets_of_ours

        found = ModelSource.of(nets_of_ours.small)
    forget()
    # A worker's own, which ends with the test.
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield found
    forget()


def forget() -> None:
    for name in ("nets_of_ours", "layers_of_ours"):
        sys.modules.pop(name, None)


def test_a_worker_finds_what_the_program_found(source: ModelSource, tmp_path: Path):
    assert str(tmp_path / "src") in source.function.folders
    assert isinstance(build_model(source, tmp_path, 0), nn.Linear)


def test_a_worker_without_the_folder_says_which_module_it_lacks(source: ModelSource, tmp_path: Path):
    (tmp_path / "src").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError) as caught:
        build_model(source, tmp_path, 0)
    assert caught.value.code == "module_function"
    assert "small imports 'nets_of_ours', and there is no such module in this process." in caught.value.message
    assert "PYTHONPATH" in caught.value.remedy
    assert caught.value.__cause__ is None
