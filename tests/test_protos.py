"""The generated stubs match their proto files."""

import subprocess
import sys

import pytest

from tests.layout import LAB, ROOT

PROTOS = [
    (ROOT, "raycloak/attestation/service/evidence"),
    (ROOT, "raycloak/coordinator/client/service"),
    (LAB.parent, "raycloak_lab/adapter/adapter"),
]


@pytest.mark.parametrize("change", [None, "extra"])
@pytest.mark.parametrize(("root", "proto"), PROTOS)
def test_the_stubs_in_the_repository_are_generated_from_the_proto_file(root, proto, change, tmp_path):
    source = tmp_path / f"{proto}.proto"
    source.parent.mkdir(parents=True)
    text = (root / f"{proto}.proto").read_text()
    source.write_text(text + (f"message {change} {{}}\n" if change else ""))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    # In a process of its own: protoc and TenSEAL each bring a protobuf, and the second one ends the process.
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{tmp_path}", *outputs, f"{proto}.proto"]
    subprocess.run(protoc, check=True, timeout=120)
    stubs = [f"{proto}_pb2.py", f"{proto}_pb2.pyi", f"{proto}_pb2_grpc.py"]
    same = [(tmp_path / name).read_text() == (root / name).read_text() for name in stubs]
    assert same == ([True] * 3 if change is None else [False, False, True]), "run make proto"
