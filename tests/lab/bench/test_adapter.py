"""The bench of an encrypted adapter: the widths that it is asked for, and both others that it is compared with."""

import json

from typer.testing import CliRunner

from raycloak_lab.bench import adapter
from raycloak_lab.cli.app import app


def test_it_measures_the_encoders_widths_and_one_of_a_large_model():
    assert [width for width, _, _ in adapter.CASES] == [384, 768, 4096]


def test_a_block_is_compared_with_the_clear_adapter_and_tenseals_own_product(monkeypatch, capfd):
    monkeypatch.setattr(adapter, "CASES", ((16, 2, 256),))
    monkeypatch.setattr(adapter, "RUNS", 1)
    CliRunner().invoke(app, ["bench", "adapter", "--json"])
    (found,) = json.loads(capfd.readouterr().out)["widths"]
    assert (found["width"], found["rank"], found["block_tokens"]) == (16, 2, 256)
    assert all(found[f"{each}_ms"] > 0 for each in ("keygen", "encrypt", "apply", "hide", "decrypt"))
    assert all(found[f"{each}_ms_per_token"] > 0 for each in ("server", "clear", "tenseal_mm"))
    assert found["clear_bytes_per_token"] == 64 < found["down_bytes_per_token"] < found["up_bytes_per_token"]
    assert found["tenseal_mm_up_bytes_per_token"] > found["tenseal_mm_down_bytes_per_token"] > 10_000
    assert found["largest_error"] < 5e-3
