"""Writes the bill of materials of a wheel, in CycloneDX: ``make sbom``.

A bill has the packages that the wheel requires, directly or not, at the versions of constraints.txt, and which of them
requires which. What has no version there is left out: packages that another system alone needs, and those of NVIDIA,
which a CUDA build of torch pins itself.

Guarantee: one wheel in environments of one Python version gives one bill, byte for byte. Its time is that of the wheel.
"""

import argparse
import hashlib
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import Distribution, PackageNotFoundError, PathDistribution, distribution
from pathlib import Path
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.layout import ROOT


def pinned() -> dict[str, str]:
    """Return the version of each package of constraints.txt, by its canonical name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = (re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?==(\S+)", line) for line in lines)
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def wheel_sbom(wheel: Path, extras: Sequence[str] = ()) -> str:
    """Return the bill of a wheel installed with ``extras``, as JSON.

    Raises:
        ValueError: this environment has another version of a package than constraints.txt.
    """
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        built = datetime(*archive.infolist()[0].date_time, tzinfo=UTC)
        own = PathDistribution(zipfile.Path(archive, f"{folder}/"))
        name = canonicalize_name(own.name)
        root = _component(name, own.version, ComponentType.APPLICATION)
        edges = _edges(name, own, extras, pinned())
    root.hashes.add(HashType(alg=HashAlgorithm.SHA_256, content=digest))
    components = {each: root if each == name else _component(each, pinned()[each]) for each in edges}
    bom = Bom(
        # The usual number is random; this one is of the content that decides the rest.
        serial_number=uuid5(NAMESPACE_URL, f"{digest}[{','.join(sorted(extras))}]"),
        metadata=BomMetaData(component=root, timestamp=built),
        components=[each for each in components.values() if each is not root],
    )
    for each, required in edges.items():
        bom.register_dependency(components[each], [components[other] for other in required])
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def _component(name: str, version: str, kind: ComponentType = ComponentType.LIBRARY) -> Component:
    purl = PackageURL("pypi", None, name, version)
    return Component(name=name, version=version, type=kind, purl=purl, bom_ref=str(purl))


def _edges(name: str, own: Distribution, extras: Sequence[str], versions: Mapping[str, str]) -> dict[str, set[str]]:
    """Return what each package requires, beginning with the wheel's own."""
    edges: dict[str, set[str]] = {name: set()}
    asked = [(name, own, extra) for extra in ("", *extras)]
    seen = {(name, extra) for extra in ("", *extras)}
    while asked:
        by, it, extra = asked.pop()
        for requirement in _required(it, extra):
            other = canonicalize_name(requirement.name)
            if other not in versions:
                continue
            edges[by].add(other)
            edges.setdefault(other, set())
            for wanted in {"", *requirement.extras} - {of for it, of in seen if it == other}:
                seen.add((other, wanted))
                asked.append((other, installed(other, versions[other]), wanted))
    return edges


def _required(it: Distribution, extra: str) -> Iterator[Requirement]:
    for requirement in map(Requirement, it.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def installed(name: str, version: str) -> Distribution:
    try:
        found = distribution(name)
    except PackageNotFoundError as error:
        raise ValueError(f"{name} is not installed: make the environment anew") from error
    # torch's own builds differ in what follows a plus sign.
    if Version(found.version).public != version:
        raise ValueError(f"{name} is installed as {found.version}, and pinned at {version}")
    return found


def main() -> None:
    """Print the bill of a wheel."""
    parser = argparse.ArgumentParser(prog="python -m tests.sbom")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("extras", nargs="*")
    arguments = parser.parse_args()
    print(wheel_sbom(arguments.wheel, arguments.extras), end="")


if __name__ == "__main__":
    main()
