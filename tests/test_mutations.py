"""The seeded bugs can all be made, and the command tells which of them the tests notice."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.mutations import FAILED, ROOT, Mutation, recorded, run

MUTATIONS = recorded()


def test_every_mutation_can_be_made_of_the_code_as_it_is():
    problems = {f"{each.room}: {each.name}": each.problem(ROOT) for each in MUTATIONS}
    assert {name: problem for name, problem in problems.items() if problem} == {}


def test_there_are_ten_of_each_room_and_no_two_are_one():
    rooms = Counter(each.room for each in MUTATIONS)
    named = "clipping", "mixing", "units", "lineage", "ledger", "masks", "appraisal", "service"
    assert rooms == dict.fromkeys(named, 10)
    assert len({(each.file, each.before, each.after) for each in MUTATIONS}) == len(MUTATIONS)
    assert [each.name for each in MUTATIONS if each.before == each.after] == []


MUTATION = Mutation("room", "a bug", "code.py", before="x > 1", after="x >= 1", tests=("test_code.py::test_it",))


@pytest.mark.parametrize(
    ("code", "tests", "problem"),
    [
        ("if x > 1:", "", None),
        ("if x > 2:", "", "its text is 0 times in code.py, not once"),
        ("x > 1 or x > 1", "", "its text is 2 times in code.py, not once"),
        (None, "", "its text is 0 times in code.py, not once"),
        ("if x > 1:", None, "there is no test_code.py::test_it"),
    ],
)
def test_a_mutation_that_cannot_be_made_is_an_error(tmp_path, code, tests, problem):
    for name, text in (("code.py", code), ("test_code.py", tests)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert MUTATION.problem(tmp_path) == problem


class ScriptedCopy:
    """A copy whose tests end with the given codes, first without a mutation."""

    def __init__(self, root, *codes):
        self.root, self.codes, self.acts = root, list(codes), []
        (root / "code.py").write_text("if x > 1:")
        (root / "test_code.py").touch()

    @contextmanager
    def mutated(self, mutation):
        self.acts.append("make")
        yield
        self.acts.append("undo")

    def test(self, tests):
        self.acts.append("test")
        return self.codes.pop(0)

    def last_words(self):
        return "FAILED it"


@pytest.mark.parametrize(
    ("codes", "said", "bad"),
    [
        ((0, FAILED), "killed", 0),
        ((0, 0), "SURVIVED", 1),
        ((0, 2), "error (its tests did not run: FAILED it)", 1),
        ((0, None), "error (its tests did not run: FAILED it)", 1),
        ((FAILED,), "error (its tests do not pass without it: FAILED it)", 1),
    ],
)
def test_a_mutation_is_killed_only_by_a_test_that_passes_without_it(tmp_path, capsys, codes, said, bad):
    copy = ScriptedCopy(tmp_path, *codes)
    assert run([MUTATION], copy) == bad
    assert f"room: a bug: {said} in" in capsys.readouterr().out
    assert copy.acts == (["test", "make", "test", "undo"] if len(codes) == 2 else ["test"])


def test_tests_are_tried_without_a_mutation_once(tmp_path):
    copy = ScriptedCopy(tmp_path, 0, FAILED, FAILED)
    assert run([MUTATION, replace(MUTATION, name="another")], copy) == 0
    assert copy.acts.count("test") == 3
