"""Fuzzes one target with atheris: ``python -m tests.fuzz.run_one TARGET CORPUS [libFuzzer options]``."""

import sys

import atheris


def main() -> None:
    with atheris.instrument_imports(include=["attestation"]):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
