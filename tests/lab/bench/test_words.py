"""`bench/words.py`: what it reports is measured, and nothing is measured that has other bytes."""

import json

import pytest
from typer.testing import CliRunner

from raycloak.metrics.errors import ConfigError, RunFailedError
from raycloak.workers.vectors.threads import WordThreads
from raycloak_lab.bench.words import NOISE, TOGETHER, bench_words
from raycloak_lab.cli.app import app


@pytest.mark.parametrize("bits", [32, 64])
def test_every_kind_of_words_is_timed_on_one_thread_and_on_several(bits):
    result = bench_words(300_007, 2, bits, rounds=2)
    noise = {f"noise, {draws} draws" for draws in NOISE}
    assert result.phases.keys() == {"copy", *noise, *TOGETHER, "aggregator's average"}
    assert result.phases["copy"].over_copy == 1
    for each in result.phases.values():
        assert min(each.alone_seconds, each.seconds, each.of_linear, each.over_copy) > 0
    assert min(result.together_of_linear, result.cores_of_linear, result.cpus) > 0


def test_words_that_differ_are_not_timed(monkeypatch):
    cut = WordThreads.cut

    def twice(self, length, least):
        return [*cut(self, length, least), *cut(self, length, least)[: self.count - 1]]

    monkeypatch.setattr(WordThreads, "cut", twice)
    with pytest.raises(RunFailedError, match="'noise, 1 draws' has other bytes on 2 threads"):
        bench_words(300_007, 2, rounds=1)


@pytest.mark.parametrize("arguments", [(12, 2), (20, 1), (20, 2, 32, 0), (20, 2, 32, 3, 0)])
def test_a_bench_of_nothing_is_refused(arguments):
    with pytest.raises(ConfigError, match="bench_input"):
        bench_words(*arguments)


@pytest.fixture
def bench(capfd):
    """Run the command in this process; returns (exit code, stdout)."""

    def run(*arguments):
        done = CliRunner().invoke(app, ["bench", "words", *arguments], standalone_mode=False)
        return done.return_value if done.exception is None else done.exit_code, capfd.readouterr().out

    return run


def test_the_command_prints_its_figures(bench):
    small = "--params", "1000", "--threads", "2", "--rounds", "1"
    code, out = bench(*small, "--json")
    assert (code, json.loads(out)["threads"]) == (0, 2)
    assert "noise, 3 draws" in bench(*small)[1]


@pytest.mark.parametrize(("wrong", "name"), [("--bits=48", "ring_bits"), ("--params=-1", "bench_input")])
def test_the_command_refuses_what_it_cannot_measure(bench, wrong, name):
    code, out = bench(wrong, "--threads=2", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, name)
