"""The generated stubs match the proto file."""

from pathlib import Path

import pytest
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[3]
FOLDER = "raycloak/attestation/service"
STUBS = ["evidence_pb2.py", "evidence_pb2.pyi", "evidence_pb2_grpc.py"]


@pytest.mark.parametrize("change", [None, "extra"])
def test_the_stubs_in_the_repository_are_generated_from_the_proto_file(change, tmp_path):
    source = tmp_path / FOLDER
    source.mkdir(parents=True)
    text = (ROOT / FOLDER / "evidence.proto").read_text()
    (source / "evidence.proto").write_text(text + (f"message {change} {{}}\n" if change else ""))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    assert protoc.main(["protoc", f"-I{tmp_path}", *outputs, f"{FOLDER}/evidence.proto"]) == 0
    same = [(source / name).read_text() == (ROOT / FOLDER / name).read_text() for name in STUBS]
    assert same == ([True] * 3 if change is None else [False, False, True]), "run make proto"
