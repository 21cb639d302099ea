"""The generated stubs are those of the proto file."""

from pathlib import Path

import pytest
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[3]
STUBS = ["evidence_pb2.py", "evidence_pb2.pyi", "evidence_pb2_grpc.py"]


@pytest.mark.parametrize("change", [None, "extra"])
def test_the_stubs_in_the_repository_are_generated_from_the_proto_file(change, tmp_path):
    source = tmp_path / "attestation"
    source.mkdir()
    text = (ROOT / "attestation" / "evidence.proto").read_text()
    (source / "evidence.proto").write_text(text + (f"message {change} {{}}\n" if change else ""))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    assert protoc.main(["protoc", f"-I{tmp_path}", *outputs, "attestation/service/evidence.proto"]) == 0
    same = [(source / name).read_text() == (ROOT / "attestation" / name).read_text() for name in STUBS]
    assert same == ([True] * 3 if change is None else [False, False, True]), "run make proto"
