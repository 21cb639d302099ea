"""`bench/device_words.py`: both sides are measured by their clocks; a command without a GPU is refused by name.

`tests/workers/device` runs it on the kernels, in Triton's interpreter.
"""

import json
import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from raycloak.metrics.errors import ConfigError, RunFailedError
from raycloak.workers.device.step_clock import StepClock
from raycloak.workers.device.words import CpuWords
from raycloak_lab.bench import device_words, gpu_use
from raycloak_lab.bench.device_words import DevicePhase, DeviceWordsBench, bench_device_words
from raycloak_lab.bench.words import NOISE
from raycloak_lab.cli.app import app

HERE = torch.device("cpu")


@pytest.mark.parametrize("bits", [32, 64])
def test_every_kind_of_words_is_timed_on_both_sides(bits):
    result = bench_device_words(HERE, 30_007, 1, bits, rounds=2)
    noise = {f"encode, noise of {draws} draws" for draws in NOISE}
    assert result.phases.keys() == {"encode", *noise, "add", "tag", "masks", "to the host"}
    for name, each in result.phases.items():
        # A CPU's words are at the host.
        assert (min(each.cpu_seconds, each.seconds) > 0) == (name != "to the host")
        assert (each.of_copy is None) == (name == "to the host")
    assert result.copy_bytes_per_second > 0


def test_shares_are_of_the_bytes_that_a_copy_moves_in_the_same_time(monkeypatch):
    """A device on which everything takes a quarter of a second moves as many bytes in it as it is asked to."""

    class Even(StepClock):
        def stop(self):
            found = super().stop()
            return type(found)(words_seconds=0.25, out_seconds=0.5)

    class EvenWords(CpuWords):
        def __init__(self, threads):
            super().__init__(threads)
            self.clock = Even(HERE)

    monkeypatch.setattr(device_words, "words_on", lambda device, threads: EvenWords(threads))
    result = bench_device_words(HERE, 1000, 1, 32, rounds=1)
    assert result.copy_bytes_per_second == 4 * 8 * 1000
    shares = {name: each.of_copy for name, each in result.phases.items() if "noise" not in name}
    assert shares == {"encode": 1.5, "add": 1.5, "tag": 0.5, "masks": 1.0, "to the host": None}
    assert result.phases["to the host"].seconds == 0.5


def test_words_that_are_not_the_cpus_are_not_timed(monkeypatch):
    class Wrong(CpuWords):
        def masked(self, vector, part, masks):
            return super().masked(vector, part, masks) + np.uint32(len(masks) > 0)

    monkeypatch.setattr(device_words, "words_on", lambda device, threads: Wrong(threads))
    with pytest.raises(RunFailedError, match="words_differ: 'masks' has other bytes on cpu than on the CPU"):
        bench_device_words(HERE, 1000, 1, rounds=1)


@pytest.mark.parametrize("arguments", [(0, 1), (20, 0), (20, 1, 32, 0), (20, 1, 32, 3, 0)])
def test_a_bench_of_nothing_is_refused(arguments):
    with pytest.raises(ConfigError, match="bench_input"):
        bench_device_words(HERE, *arguments)


def test_the_command_prints_the_devices_figures(capfd, monkeypatch):
    def run(*arguments):
        done = CliRunner().invoke(app, ["bench", "words", *arguments], standalone_mode=False)
        return done.return_value if done.exception is None else done.exit_code, capfd.readouterr().out

    small = "--device=cuda", "--params=1000", "--threads=1", "--rounds=1"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out = run(*small, "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, "no_cuda")
    code, out = run("--device=tpu", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, "bench_input")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    phases = {"masks": DevicePhase(1.0, 0.25, 0.5), "to the host": DevicePhase(1e-6, 0.5, None)}
    found = DeviceWordsBench("A card", 1000, 32, 3, 1, 1, 1e12, phases)
    monkeypatch.setattr(device_words, "bench_device_words", lambda device, *given: found)
    told = json.loads(run(*small, "--json")[1])["phases"]
    assert told["masks"] == {"cpu_seconds": 1, "seconds": 0.25, "of_copy": 0.5}
    shown = run(*small)[1]
    assert "A card, which copies 1000 GB/s" in " ".join(shown.split())
    assert re.search(r"masks\W+1\W+0.25\W+4.0\W+0.50", shown)


def averages(key, count, device="CPU", microseconds=0.0, annotated=False):
    """Return a row of a profile."""
    kind = type("Kind", (), {"name": device})
    fields = {"key": key, "count": count, "device_type": kind, "self_device_time_total": microseconds}
    return type("Row", (), {**fields, "is_user_annotation": annotated})


def test_the_use_of_a_gpu_is_its_kernels_once_and_the_waits_of_what_is_measured():
    found = gpu_use.GpuUse.of(
        [
            averages("aten::mm", 3, microseconds=700.0),
            averages("cudaLaunchKernel", 5),
            averages("cuLaunchKernelEx", 2),
            averages("cudaStreamSynchronize", 4),
            averages("cudaDeviceSynchronize", 2),
            averages("sgemm", 3, "CUDA", 700.0),
            averages("Memcpy HtoD", 9, "CUDA", 1300.0),
            averages("step", 1, "CUDA", 5000.0, annotated=True),
        ]
    )
    assert (found.launches, found.synchronisations, found.busy_seconds) == (7, 4, pytest.approx(0.002))
    assert found.longest == (("Memcpy HtoD", 0.0013, 9), ("sgemm", 0.0007, 3))
    assert gpu_use.gpu_use(lambda: pytest.fail("called"), HERE) is None
