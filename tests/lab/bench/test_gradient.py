"""`bench/gradient.py`: the peers sum the same thing, a wrong sum gets no figure, and memory is seen."""

import json
import re
import types
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import nn

from raycloak.metrics.errors import ConfigError, RunFailedError
from raycloak_lab.bench import gradient, gradient_cases, gradient_methods
from raycloak_lab.bench.gpu_use import GpuUse
from raycloak_lab.bench.gradient import GradientBench, MethodFigures, bench_gradient
from raycloak_lab.bench.gradient_cases import CASES, BenchCase, case_named
from raycloak_lab.bench.gradient_memory import peak_extra_bytes
from raycloak_lab.bench.gradient_methods import METHODS, OpacusHooks, Ours, exact_sums
from raycloak_lab.cli import app
from tests.workers.gradients.model_zoo import HiddenProduct

SMALL = replace(CASES["mlp"], rows=4, micro_batches=2)
TINY = BenchCase("tiny", 4, 2)
"""For what is the same of any model; see `_tiny`."""
ALL = ("opacus", "ghost", "plain")
PEAKS = {"ours": 3_000_000, "opacus": 8_000_000, "ghost": 2_500_000, "plain": 2_000_000}
TEXTS = ("bert", "bert-lora", "gpt2", "gpt2-lora", "llama-lora")


@pytest.fixture(autouse=True)
def _torch_as_before():
    mode, threads = torch.get_deterministic_debug_mode(), torch.get_num_threads()
    yield
    torch.set_deterministic_debug_mode(mode)
    torch.set_num_threads(threads)


@pytest.fixture
def _peaks_known(monkeypatch):
    monkeypatch.setattr(gradient, "peak_extra_bytes", lambda case, name, device, threads: PEAKS[name])


@pytest.fixture
def _tiny(monkeypatch):
    kind = gradient_cases._Kind(lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 10)), (16,))
    monkeypatch.setattr(gradient_cases, "_KINDS", {"tiny": kind})


class HiddenUse(nn.Module):
    """A model that uses a parameter where nobody sees an example's share of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return HiddenProduct.apply(x, self.layer.weight)


def _bench(case=SMALL, against=ALL, rounds=2):
    return bench_gradient(case, against, device="cpu", threads=1, rounds=rounds)


@pytest.fixture
def command(capfd, monkeypatch):
    monkeypatch.setattr(app, "leave_stdout", lambda: None)

    def run(*arguments):
        with pytest.raises(SystemExit) as ending:
            app.main(["bench", "gradient", *arguments])
        return ending.value.code, capfd.readouterr().out

    return run


@pytest.mark.usefixtures("_peaks_known")
def test_all_methods_make_the_clipped_sum_and_ratios_are_those_of_a_round():
    result = _bench(rounds=3)
    assert list(result.methods) == ["ours", *ALL]
    for name, figures in result.methods.items():
        assert figures.refused is None, (name, figures.reason)
        assert figures.seconds.low <= figures.seconds.median <= figures.seconds.high
        assert figures.peak_extra_bytes == PEAKS[name]
        assert figures.sum_error < gradient.TOLERANCE
    assert result.methods["plain"].vs_nonprivate == gradient.RoundSpread(1.0, 1.0, 1.0)
    assert result.vs_nonprivate == result.methods["ours"].vs_nonprivate
    ours, hooks = result.methods["ours"].seconds, result.methods["opacus"].seconds
    assert hooks.low / ours.high <= result.vs_opacus_hooks.low <= result.vs_opacus_hooks.high <= hooks.high / ours.low
    assert result.memory_vs_nonprivate == 1.5
    assert result.methods["ours"].bytes_per_parameter == pytest.approx(3_000_000 / 1_001_738)


@pytest.mark.usefixtures("_peaks_known")
def test_the_command_prints_one_object_with_every_figure(monkeypatch, command):
    monkeypatch.setattr(gradient_cases, "CASES", {"mlp": SMALL})
    code, out = command("mlp", "--against", "plain", "--rounds", "2", "--json")
    shown = json.loads(out)
    assert code == 0
    assert set(shown) == {field.name for field in fields(GradientBench)}
    assert set(shown["methods"]) == {"ours", "plain"}
    assert set(shown["methods"]["ours"]) == {field.name for field in fields(MethodFigures)}
    assert set(shown["vs_nonprivate"]) == {"median", "low", "high"}
    # Peers that nobody asked for have no figure.
    assert shown["vs_opacus_hooks"] is shown["vs_opacus_ghost"] is None
    assert (shown["model"], shown["clock"], shown["rows"], shown["micro_batches"]) == ("mlp", "processor", 4, 2)


@pytest.mark.usefixtures("_peaks_known")
def test_on_a_gpu_each_method_has_its_launches_waits_and_busy_share(monkeypatch, command):
    monkeypatch.setattr(gradient_cases, "CASES", {"mlp": SMALL})
    monkeypatch.setattr(gradient, "gpu_use", lambda work, device: GpuUse(1234, 5, 1e-3, ()))
    result = _bench(against=("plain",))
    for figures in result.methods.values():
        assert figures.gpu_busy == 1e-3 / figures.seconds.median
    shown = command("mlp", "--against", "plain", "--rounds", "1")[1]
    assert "GPU busy" in shown
    assert shown.count("1,234") == 2


@pytest.mark.usefixtures("_peaks_known")
def test_a_method_that_refuses_the_model_has_a_code_in_place_of_figures(monkeypatch):
    kind = gradient_cases._Kind(HiddenUse, (784,))
    monkeypatch.setattr(gradient_cases, "_KINDS", {"hidden": kind})
    result = _bench(BenchCase("hidden", 4, 2), rounds=1)
    ours, hooks = result.methods["ours"], result.methods["opacus"]
    assert (ours.refused, ours.seconds, ours.vs_nonprivate, ours.peak_extra_bytes) == (
        "unsupported_layer",
        None,
        None,
        None,
    )
    assert ours.reason
    assert hooks.refused
    assert hooks.seconds is None
    assert result.vs_nonprivate is result.vs_opacus_hooks is result.memory_vs_nonprivate is None
    assert result.methods["plain"].seconds.median > 0


@pytest.mark.usefixtures("_peaks_known")
def test_a_person_reads_ranges_and_refusals_in_a_table(monkeypatch, command):
    monkeypatch.setattr(gradient_cases, "_KINDS", {"hidden": gradient_cases._Kind(HiddenUse, (784,))})
    monkeypatch.setattr(gradient_cases, "CASES", {"hidden": BenchCase("hidden", 4, 1)})
    code, out = command("hidden", "--against", "plain", "--rounds", "1")
    assert code == 0
    assert "1 x 4 rows, cpu, 1 thread(s), 1 rounds, processor time" in " ".join(out.split())
    assert re.search(r"ours +│ refused: unsupported_layer", out)
    assert re.search(r"plain +│ [\d.e-]+ \([\d.e-]+ to [\d.e-]+\) +│ 1 \(1 to 1\)", out)


@pytest.mark.usefixtures("_peaks_known", "_tiny")
def test_a_wrong_sum_of_ours_ends_the_command_with_code_4(monkeypatch, command):
    monkeypatch.setattr(gradient_cases, "CASES", {"mlp": TINY})
    right = Ours.total
    monkeypatch.setattr(Ours, "total", lambda self: right(self) * 1.004)
    code, out = command("mlp", "--against", "plain", "--rounds", "1", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (4, "wrong_sum")


@pytest.mark.usefixtures("_peaks_known", "_tiny")
def test_a_sum_that_misses_one_example_is_wrong(monkeypatch):
    case = replace(TINY, rows=16)
    monkeypatch.setattr(gradient, "exact_sums", _without_the_last)
    with pytest.raises(RunFailedError, match="wrong_sum"):
        _bench(case, ("plain",), 1)


def _without_the_last(work):
    features, labels = work.batches[-1]
    return exact_sums(replace(work, batches=[*work.batches[:-1], (features[:-1], labels[:-1])]))


@pytest.mark.usefixtures("_peaks_known", "_tiny")
def test_a_peer_whose_sum_is_wrong_is_named_and_gives_no_ratio(monkeypatch):
    right = OpacusHooks.total
    monkeypatch.setattr(OpacusHooks, "total", lambda self: right(self) * (1 + 2 * gradient.TOLERANCE))
    result = _bench(TINY, rounds=1)
    hooks = result.methods["opacus"]
    assert (hooks.refused, hooks.seconds) == ("wrong_sum", None)
    assert hooks.sum_error > gradient.TOLERANCE
    assert result.vs_opacus_hooks is None
    assert result.vs_opacus_ghost is not None


@pytest.mark.usefixtures("_peaks_known", "_tiny")
def test_a_sum_that_grows_from_run_to_run_is_wrong_too(monkeypatch):
    monkeypatch.setattr(gradient_methods, "_forget_sums", _start_from_none_once)
    result = _bench(TINY, ("opacus", "ghost"), 1)
    assert {name: result.methods[name].refused for name in result.methods} == {
        "ours": None,
        "opacus": "wrong_sum",
        "ghost": "wrong_sum",
    }


def _start_from_none_once(trained):
    for tensor in trained:
        tensor.summed_grad = getattr(tensor, "summed_grad", None)


def test_methods_take_turns_and_another_begins_each_round():
    turns = []
    ticks = iter(range(1000))

    def method(name):
        return types.SimpleNamespace(run=lambda: turns.append(name))

    measured = {name: gradient._Measured(method=method(name)) for name in ("a", "b", "c")}
    gradient._time_in_turns(measured, 3, lambda: float(next(ticks)))
    assert turns == list("abcbcacab")
    assert [len(each.seconds) for each in measured.values()] == [3, 3, 3]


def test_the_memory_of_per_example_gradients_is_seen_and_a_sum_for_all_costs_less():
    case = replace(CASES["mlp"], rows=32, micro_batches=2)
    gradients = 4 * 1_001_738
    hooks, plain = (peak_extra_bytes(case, name, torch.device("cpu"), 1) for name in ("opacus", "plain"))
    # One micro-batch of per-example gradients against one gradient; each has temporary copies beside it.
    assert hooks > 32 * gradients
    assert gradients <= plain < 6 * gradients


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_model_keeps_examples_apart_and_trains_what_its_name_says(name):
    case = replace(CASES[name], rows=4, micro_batches=1)
    module = case.build()
    trained = {each for each, tensor in module.named_parameters() if tensor.requires_grad}
    adapters = {each for each, _ in module.named_parameters() if "lora_" in each}
    assert trained >= adapters
    if name.endswith("-lora"):
        assert adapters
        assert all(".classifier." in each for each in trained - adapters)
    else:
        assert trained == {each for each, _ in module.named_parameters()}
    features, labels = case.batches()[0]
    changed = features.copy()
    changed[0] = (changed[0] + 1) % 5000
    with torch.no_grad():
        before, after = (case.loss_fn(module(torch.tensor(ids)), torch.tensor(labels)) for ids in (features, changed))
    assert before.shape == (4,)
    assert torch.equal(before[1:], after[1:])
    assert before[0] != after[0]


def test_a_model_and_its_batch_are_the_same_every_time():
    first, second = (CASES["mlp"].build().state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(
        np.array_equal(a, b)
        for one, other in zip(CASES["mlp"].batches(), CASES["mlp"].batches(), strict=True)
        for a, b in zip(one, other, strict=True)
    )


def test_a_text_model_without_the_extra_is_refused_by_name(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(gradient_cases, "import_module", missing)
    with pytest.raises(ConfigError, match=r"missing_extra: .*transformers.*raycloak\[hf\]"):
        CASES["bert"].build()


@pytest.mark.parametrize(
    "arguments",
    [
        {"against": ("jax",)},
        {"device": "tpu"},
        {"threads": 0},
        {"rounds": 0},
    ],
)
def test_a_bench_of_nothing_is_refused(arguments):
    given = {"against": ALL, "device": "cpu", "threads": 1, "rounds": 1} | arguments
    with pytest.raises(ConfigError, match="bench_input"):
        bench_gradient(SMALL, **given)


def test_the_help_names_every_model_and_every_peer(command):
    with pytest.raises(ConfigError, match=r"bench_input: .*'resnet'.*cnn, mlp, bert"):
        case_named("resnet")
    _, out = command("--help")
    words = set(re.findall(r"[\w-]+", out))
    assert words >= {*CASES, *METHODS} - {"ours"}
