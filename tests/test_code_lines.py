"""The count of code lines: what is counted and what is not, and which files are in the wheel."""

from collections import Counter

from tests.code_lines import GENERATED, by_room, code_lines, report, wheels
from tests.layout import ROOT

SOURCE = '''"""A module,

of two lines."""

# A comment.
LIMIT = 3  # counted: a token stands before the comment
"""What it is, which is no code."""

def f(
    text="""one
    two"""
):
    """A docstring."""

    return text
'''


def test_lines_with_a_token_count_and_docstrings_comments_and_blank_lines_do_not():
    assert code_lines(SOURCE) == 1 + 4 + 1
    assert code_lines('"""Only a docstring."""\n') == code_lines("") == 0


def test_rooms_are_added_up_and_stubs_are_counted_apart(tmp_path):
    for name in ("p/a.py", "p/r/b.py", "p/r/inner/c.py", "p/r/x_pb2_grpc.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    found = by_room(tmp_path.rglob("*.py"), tmp_path)
    assert found == Counter({"p": 1, "p/r": 2, GENERATED: 1})
    assert report(found).splitlines()[-2:] == ["      3 total", f"      1 {GENERATED}"]


def test_all_that_each_wheel_contains_is_counted_and_nothing_else():
    ours, beside = ({path.relative_to(ROOT).as_posix() for path in files} for files in wheels().values())
    assert {"raycloak/__main__.py", "coordinator/cli/app.py", "metrics/errors.py"} <= ours
    assert not [name for name in ours if name.startswith(("tests/", "benchmarks/", "raycloak/metrics/", "lab/"))]
    assert "lab/raycloak_lab/cli/app.py" in beside
    assert all(name.startswith("lab/raycloak_lab/") for name in beside)
