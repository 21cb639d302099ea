"""An import contract: modules of a room are imported from outside through its doors alone.

The doors are stated once, in the docstring of the room's ``__init__.py``, on the lines from ``Doors:`` to a full stop.
The contract is import-linter's own `protected`, once for each room, over the modules that the docstring leaves out.
"""

import ast
import importlib.util
import re
from pathlib import Path

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class DoorsContract(Contract):
    """A contract: every room below ``containers`` names its doors, keeps to them, and names none that nobody uses.

    Configuration options:
        containers: the packages whose sub-packages are rooms; a sub-package of a room is a room too.
    """

    type_name = "doors"

    containers = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        broken: list[str] = []
        for room in self._rooms(graph):
            stated = doors_of(_docstring(room))
            if stated is None:
                broken.append(f"{room} names no doors in its docstring")
                continue
            modules = {name.rsplit(".", 1)[1]: name for name in graph.find_children(room)}
            modules = {short: name for short, name in modules.items() if not graph.find_children(name)}
            broken += [f"{room} names a door that is not there: {door}" for door in sorted(stated - modules.keys())]
            for short, module in sorted(modules.items()):
                importers = graph.find_modules_that_directly_import(module)
                strangers = sorted(name for name in importers if name.rpartition(".")[0] != room)
                if short in stated and not strangers:
                    broken.append(f"{room} names a door that nobody uses: {short}")
                if short not in stated:
                    broken += [f"{name} imports {module}, which is not a door of its room" for name in strangers]
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def _rooms(self, graph: ImportGraph) -> list[str]:
        packages: list[str] = self.containers  # type: ignore[assignment]
        inside = {name for package in packages for name in graph.find_descendants(package)}
        return sorted(name for name in inside if graph.find_children(name))

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["broken"]:
            output.print_error(line)


def doors_of(docstring: str) -> set[str] | None:
    """Return the module names that a room's docstring states as its doors; None if it states nothing."""
    found = re.search(r"^Doors: ([^.]*)\.$", docstring, re.MULTILINE)
    return set(re.findall(r"\w+", found[1])) - {"none"} if found else None


def _docstring(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or ""
