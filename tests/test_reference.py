"""`docs/reference/` has every public name, and is what `tests.reference` writes of the docstrings as they are."""

import re

import raycloak
from tests.reference import FOLDER, pages


def test_the_reference_is_up_to_date():
    written = pages()
    found = {path.name: path.read_text() for path in FOLDER.glob("*.md")}
    outdated = sorted(name for name in written.keys() | found.keys() if written.get(name) != found.get(name))
    assert outdated == [], "write the pages: make reference"


def test_every_public_name_has_one_entry_with_a_text():
    entries = [entry for text in pages().values() for entry in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]
    assert sorted(entry.split("\n")[0] for entry in entries) == [
        name for name in raycloak.__all__ if name != "__version__"
    ]
    assert all(re.search(r"^```\n\n\S", entry, flags=re.MULTILINE) for entry in entries)


def test_a_name_is_written_with_its_parameters_sections_and_methods():
    text = pages()["training.md"]
    assert "Trainer(\n    config: RunConfig,\n    *,\n    model_init_fn" in text
    assert "### Trainer.train\n\n```text\ntrain() -> dict[str, Any]\n```\n" in text
    assert "* `run_secret`: file of 64 hexadecimal digits; the same secret repeats the same run." in text
