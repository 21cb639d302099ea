"""Text is generated from released weights, in a process of its own, and from no others."""

import os
import shutil
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.client.results import Completion, from_wire
from raycloak.coordinator.record.folder import RunFolder
from raycloak.coordinator.runs.released_model import model_at
from raycloak.coordinator.service.sampling import generation
from raycloak.coordinator.service.sampling import sampler as sampler_module
from raycloak.coordinator.service.sampling.generation import Generator
from raycloak.coordinator.service.sampling.sampler import Sampler, SamplerLimits
from raycloak.metrics.errors import ModelError, RefusedError
from raycloak.metrics.service_errors import (
    FutureCancelledError,
    FutureFailedError,
    ServiceQueueFullError,
    ServiceStateError,
    ServiceValidationError,
)
from tests.process_ends import has_ended
from tests.protocol import RENYI, trained
from tests.tiny_text import write_bert, write_gpt2, write_reviews

PROMPTS = ("the film is", "a", "good plot was very fine")
GREEDY = wire.Sample(prompts=PROMPTS, max_tokens=6, top_p=1.0, completions=1)
DRAWN = wire.Sample(prompts=PROMPTS, max_tokens=8, temperature=0.9, top_p=0.95, top_k=8, seed=5, completions=2)
DEADLINE_S = 300


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the run directory of a name; each is trained once."""
    site, made = tmp_path_factory.mktemp("public"), {}
    write_gpt2(site / "gpt2", n_layer=1)
    write_bert(site / "bert", num_hidden_layers=1)
    write_reviews(site / "train.tsv", 40)
    (site / "plot.txt").write_text("the film was very fine a plot is dull\n" * 36)
    blocks = {
        "model": {"hf": str(site / "gpt2"), "task": "causal_lm"},
        "dataset": {"kind": "text_blocks", "path": str(site / "plot.txt"), "max_length": 8},
    }
    settings = {
        "plain": {"model": "tests.models:small_model"},
        "bert": {
            "model": {"hf": str(site / "bert"), "task": "sequence_classification", "classes": 2},
            "dataset": {"kind": "text", "path": str(site / "train.tsv"), "max_length": 8},
        },
        "whole": blocks,
        "lora": {**blocks, "model": {**blocks["model"], "lora": {"rank": 2}}},
    }

    def run(name):
        if name not in made:
            home = tmp_path_factory.mktemp("home")
            found = trained(home, **{**settings[name], "steps": 1, "micro_batch_size": 8, "dp_config": RENYI})
            # The first to ask may be a fixture, which is made before its test has a state folder.
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("RAYCLOAK_HOME", str(home))
                folder = RunFolder.create(found.config, found.session.run_id, str(found.home), None)
            for file in ("manifest.json", "parameters.safetensors"):
                shutil.copy2(found.folder / file, folder.path)
            folder.mark("done")
            made[name] = source_of(folder.path.rename(home / name), found.digests[-1])
        return made[name]

    return run


@dataclass(frozen=True)
class Source:
    """The weights of a run, in a copy whose name is their digest; see `Sampler.submit`."""

    run: Path
    model_digest: str
    folder: Path | None = None

    @property
    def parameters(self):
        return (self.folder or self.run) / f"{self.model_digest}.safetensors"


def source_of(run, model_digest):
    source = Source(run, model_digest)
    if (weights := run / "parameters.safetensors").exists():
        shutil.copy2(weights, source.parameters)
    return source


def asked(request, **fields):
    """Return a request with other fields."""
    same = {field.name: getattr(request, field.name) for field, _ in request.ListFields()}
    return wire.Sample(**{**same, **fields})


def model_of(source):
    return model_at(source.run, source.parameters, source.model_digest)


def fixed_model(source):
    """Return the model of a run with weights that are the same in each execution; a run's noise is not.

    With some weights a completion is empty, or none ends before the others.
    """
    model, fixed = model_of(source), torch.Generator().manual_seed(28)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.normal_(std=0.1, generator=fixed)
    return model


@pytest.fixture(scope="module")
def whole(runs):
    return Generator(fixed_model(runs("whole")))


def complete(generator, request, cancelled=lambda: False, on_rate=lambda rate: None):
    """Return the completions and the pieces of each."""
    pieces: dict[int, str] = {}

    def on_text(place, text):
        pieces[place] = pieces.get(place, "") + text

    return generator.complete(request, on_text, on_rate, cancelled), pieces


@pytest.mark.parametrize("name", ["whole", "lora"])
def test_completions_of_a_batch_are_those_that_transformers_writes_for_each_prompt_alone(runs, name):
    source = runs(name)
    found, _ = complete(Generator(model_of(source)), GREEDY)
    fresh = model_of(source)
    tokenizer = Generator(fresh)._tokenizer
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([[2, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]])
        written = fresh.module.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6, pad_token_id=0
        )[0, ids.shape[1] :].tolist()
        ended = 3 in written
        assert found[number] == Completion(
            number,
            "".join(f" {word}" for word in tokenizer.decode(written, skip_special_tokens=True).split()),
            "stop" if ended else "length",
            len(written),
        )


def test_guarantee_the_pieces_are_the_text_and_a_seed_gives_it_again(whole):
    first, pieces = complete(whole, DRAWN)
    assert [each.prompt for each in first] == [0, 0, 1, 1, 2, 2]
    assert [pieces.get(place, "") for place in range(6)] == [each.text for each in first]
    assert complete(whole, DRAWN)[0] == first
    assert complete(whole, asked(DRAWN, seed=6))[0] != first


def test_guarantee_a_rate_is_the_tokens_so_far_over_the_time_that_they_took(runs):
    now, rates = [0.0], []
    generator = Generator(fixed_model(runs("whole")), lambda: now[0])

    def cancelled():
        now[0] += 0.125  # after each token of every row
        return False

    found, _ = complete(generator, asked(DRAWN, max_tokens=12), cancelled, rates.append)
    counts = [each.tokens for each in found]
    assert len(set(counts)) > 1, "a completion that has ended generates no tokens"
    longest, told = max(counts), range(3, max(counts) + 1, 2)
    expected = [sum(min(count, tokens) for count in counts) / (0.125 * (tokens - 1)) for tokens in told]
    assert rates == [*expected, sum(counts) / (0.125 * longest)]


def test_a_cancelled_request_tells_no_rate_of_its_end(whole):
    rates = []
    assert complete(whole, GREEDY, lambda: True, rates.append)[0] is None
    assert len(rates) <= 1


def test_one_token_of_top_k_or_of_a_small_top_p_is_the_greedy_one(whole):
    greedy = complete(whole, GREEDY)[0]
    assert complete(whole, asked(GREEDY, temperature=1.0, top_k=1))[0] == greedy
    assert complete(whole, asked(GREEDY, temperature=1.0, top_p=1e-6))[0] == greedy


def test_a_stop_text_ends_a_completion_and_is_no_part_of_it(whole):
    (before,), _ = complete(whole, asked(GREEDY, prompts=("the film is",), max_tokens=12))
    words = before.text.split()
    assert len(words) > 3
    stop = f"{words[1][-1]} {words[2][:2]}"
    (found,), pieces = complete(whole, asked(GREEDY, prompts=("the film is",), max_tokens=12, stop=("zz", stop)))
    assert found.finish_reason == "stop"
    assert found.text == before.text[: before.text.index(stop)]
    assert pieces[0] == found.text
    assert found.tokens <= 3


def test_a_cancelled_request_ends_before_its_next_token(whole):
    answers = iter([False, False, True])
    found, pieces = complete(whole, asked(GREEDY, prompts=("the film is",)), lambda: next(answers))
    assert found is None
    assert len(pieces.get(0, "").split()) <= 3


@pytest.mark.parametrize(("prompt", "code"), [("film " * 20, "prompt_too_long"), ("film " * 40, "prompt_too_long")])
def test_a_prompt_beyond_the_context_is_refused(whole, prompt, code):
    with pytest.raises(ServiceValidationError) as refusal:
        complete(whole, asked(GREEDY, prompts=("a", prompt)))
    assert (refusal.value.code, refusal.value.field) == (code, "prompts.1")


def test_an_empty_prompt_begins_with_the_token_that_begins_a_text(whole):
    assert complete(whole, asked(GREEDY, prompts=("",)))[0][0].tokens > 0


def test_weights_that_have_diverged_say_so(runs):
    model = model_of(runs("whole"))
    generator = Generator(model)
    with torch.no_grad():
        next(model.module.parameters()).fill_(torch.nan)
    for request in (GREEDY, DRAWN):
        with pytest.raises(FutureFailedError) as failure:
            complete(generator, request)
        assert failure.value.code == "not_finite"


def test_texts_have_a_bound_together(runs, monkeypatch):
    generator = Generator(fixed_model(runs("whole")))
    texts = complete(generator, DRAWN)[0]
    size = sum(len(each.text.encode()) for each in texts)
    monkeypatch.setattr(generation, "MOST_RESULT_BYTES", size)
    assert complete(generator, DRAWN)[0] == texts
    monkeypatch.setattr(generation, "MOST_RESULT_BYTES", size // 2)
    with pytest.raises(FutureFailedError) as failure:
        complete(generator, DRAWN)
    assert failure.value.code == "text_too_long"


@pytest.mark.parametrize("name", ["plain", "bert"])
def test_a_model_that_writes_no_text_is_refused(runs, name):
    with pytest.raises(FutureFailedError) as refusal:
        Generator(model_of(runs(name)))
    assert refusal.value.code == "cannot_generate"


def test_a_file_of_other_weights_is_refused(runs, tmp_path):
    source = runs("whole")
    arrays = load_file(source.parameters)
    next(iter(arrays.values())).reshape(-1)[0] += 1
    save_file(arrays, tmp_path / "other", metadata={"model_digest": source.model_digest})
    with pytest.raises(RefusedError) as refusal:
        model_at(source.run, tmp_path / "other", source.model_digest)
    assert refusal.value.code == "weights_changed"
    with pytest.raises((ModelError, RefusedError)):
        model_at(source.run, runs("plain").parameters, source.model_digest)


def test_a_request_that_the_desk_would_refuse_is_a_defect_of_the_caller(tmp_path, sampler):
    with pytest.raises(AssertionError, match="the desk has checked it"):
        submit(sampler(), source_of(tmp_path, "00" * 32), asked(DRAWN, completions=22))


class Listener:
    """What the sampler tells of one request; ``cancel`` cancels it."""

    def __init__(self, cancel) -> None:
        self.cancel = cancel
        self.pieces: dict[int, str] = {}
        self.rates: list[float] = []
        self.begun = threading.Event()
        self._ended = threading.Event()
        self._outcome = None

    def on_tokens(self, place, text):
        self.pieces[place] = self.pieces.get(place, "") + text
        self.begun.set()

    def on_done(self, completions, cause):
        assert not self._ended.is_set(), "a request ends once"
        self._outcome = cause or tuple(map(from_wire, completions))
        self._ended.set()

    def outcome(self):
        assert self._ended.wait(DEADLINE_S)
        return self._outcome


class Listening(Sampler):
    """A sampler, and the listeners of its requests."""

    def __init__(self, folder, limits=None, clock=time.monotonic):
        self.listeners, self.names = {}, count()
        super().__init__(
            limits or SamplerLimits(),
            folder,
            folder / "signer.pub.json",
            lambda name, place, text: self.listeners[name].on_tokens(place, text),
            lambda name, rate: self.listeners[name].rates.append(rate),
            lambda name, *outcome: self.listeners[name].on_done(*outcome),
            clock,
        )


@pytest.fixture
def sampler(tmp_path):
    made = []

    def make(**limits):
        made.append(Listening(tmp_path, SamplerLimits(**limits)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def submit(sampler, source, request, tenant="north", on_done=None):
    name = f"c.{next(sampler.names)}"
    listener = sampler.listeners[name] = Listener(lambda: sampler.cancel(name))
    if on_done is not None:
        listener.on_done = on_done
    sampler.submit(name, tenant, str(source.parameters), str(source.run), request)
    return listener


def children():
    """Return the processes that this one has started and that live."""
    every = []
    for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        # A thread that has ended since it was found, such as a timer, has none. A thread that waits for one lives.
        with suppress(OSError):
            every += path.read_text().split()
    return [int(each) for each in every if b"service.sampling.process" in Path(f"/proc/{each}/cmdline").read_bytes()]


def test_text_comes_from_a_process_of_its_own_that_is_kept_for_the_next_weights_of_the_run(runs, sampler):
    source, service, begun = runs("whole"), sampler(), time.monotonic()
    here = Generator(model_of(source))
    first = submit(service, source, DRAWN)
    second = submit(service, source, GREEDY)
    assert first.outcome() == complete(here, DRAWN)[0]
    assert 0 < sum(each.tokens for each in first.outcome()) / first.rates[-1] <= time.monotonic() - begun
    assert [first.pieces.get(place, "") for place in range(6)] == [each.text for each in first.outcome()]
    assert second.outcome() == complete(here, GREEDY)[0]
    (process,) = children()

    refused = submit(service, source_of(source.run, "00" * 32), GREEDY)
    assert isinstance(refused.outcome(), FutureFailedError)
    assert refused.outcome().code == "weights_changed"

    arrays = {name: -array for name, array in load_file(source.parameters).items()}
    other = changed(runs("whole"), arrays)
    third = submit(service, other, GREEDY)
    assert third.outcome() == complete(Generator(model_of(other)), GREEDY)[0]
    long = submit(service, source, asked(GREEDY, prompts=("film " * 30,)))
    assert isinstance(long.outcome(), ServiceValidationError)
    assert (long.outcome().code, long.outcome().field) == ("prompt_too_long", "prompts.0")
    assert children() == [process], "it was kept all the time"


def test_a_process_that_is_killed_is_started_anew(sampler, tmp_path):
    service, source = sampler(), source_of(tmp_path, "00" * 32)
    assert submit(service, source, GREEDY).outcome().code == "not_a_run"
    (process,) = children()
    os.kill(process, signal.SIGKILL)
    # It may be told of the request before its death is seen.
    assert submit(service, source, GREEDY).outcome().code in ("not_a_run", "sampler_failed")
    assert submit(service, source, GREEDY).outcome().code == "not_a_run"
    assert process not in children()


def changed(source, arrays):
    """Return a source of other weights of the same run, as a later release has them."""
    from raycloak.coordinator.runs.released_model import _digest

    manifest = RunFolder.open(source.run).manifest()
    flat = np.concatenate([arrays[tensor.name].reshape(-1) for tensor in manifest.computation.tensors])
    later = Source(source.run, _digest(manifest, flat))
    save_file(arrays, later.parameters)
    return later


def test_guarantee_requests_end_once_and_no_process_outlives_the_sampler(runs, sampler, tmp_path):
    service, whole, lora = sampler(processes=1), runs("whole"), runs("lora")
    first = submit(service, whole, GREEDY)
    other = submit(service, lora, GREEDY)
    second = submit(service, whole, GREEDY)
    other.cancel()
    assert isinstance(other.outcome(), FutureCancelledError)
    first.cancel()
    first.cancel()
    assert isinstance(first.outcome(), FutureCancelledError)
    assert len(second.outcome()) == len(PROMPTS)
    (process,) = children()
    # Another run gets the one place at once, long before the first process has been idle for long.
    third = submit(service, source_of(tmp_path, "00" * 32), GREEDY)
    assert third.outcome().code == "not_a_run"
    assert process not in children()
    running = submit(service, whole, GREEDY)
    queued = submit(service, lora, GREEDY)
    service.close()
    assert isinstance(running.outcome(), FutureCancelledError)
    assert isinstance(queued.outcome(), FutureCancelledError)
    assert children() == []
    assert isinstance(submit(service, whole, GREEDY).outcome(), ServiceStateError)


def test_what_takes_too_long_or_too_much_memory_fails_by_name(runs, sampler):
    slow = submit(sampler(request_s=0.2), runs("whole"), GREEDY)
    assert slow.outcome().code == "sample_timeout"
    large = submit(sampler(memory_bytes=2**27), runs("whole"), GREEDY)
    assert large.outcome().code in ("sample_memory", "sampler_failed")


class Clocked:
    """Processes that only take time, by a clock: a second for each token.

    Attributes:
        order: tenants, in the order of their requests.
        begun, goes_on: whether the first request has begun, and whether it may end.
    """

    def __init__(self):
        self.now, self.order = 0.0, []
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.alive = True

    def __call__(self, run, limits, logs):
        return self

    def outcome(self, sample, on_text, on_rate):
        self.begun.set()
        assert self.goes_on.wait(DEADLINE_S)
        self.now += wire.Sample.FromString(sample.request).max_tokens
        self.order.append(sample.parameters.parent.name)
        return ()

    def close(self):
        pass


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one after another"])
def test_guarantee_a_tenant_gets_no_more_of_the_time_whatever_it_asks_for(monkeypatch, tmp_path, at_once):
    """North asks for ten seconds each time and south for one."""
    clocked, ended = Clocked(), threading.Semaphore(0)
    monkeypatch.setattr(sampler_module, "_Process", clocked)
    sampler = Listening(tmp_path, clock=lambda: clocked.now)
    again = [] if at_once else ["north"] * 3

    def ask(tenant):
        request = asked(GREEDY, max_tokens=10 if tenant == "north" else 1)
        submit(sampler, source_of(tmp_path / tenant, "00" * 32), request, tenant, lambda *_: end(tenant))

    def end(tenant):
        # It asks again in the moment it has its answer.
        if tenant == "north" and again:
            ask(again.pop())
        ended.release()

    try:
        ask("north")
        assert clocked.begun.wait(DEADLINE_S)
        for tenant in ["north"] * (3 if at_once else 0) + ["south"] * 30:
            ask(tenant)
        clocked.goes_on.set()
        assert all(ended.acquire(timeout=DEADLINE_S) for _ in range(34))
    finally:
        clocked.goes_on.set()
        sampler.close()
    spent = Counter()
    for tenant in clocked.order:
        spent[tenant] += 10 if tenant == "north" else 1
        assert spent["north"] <= spent["south"] + 10


def test_a_tenant_that_asked_for_nothing_has_saved_no_time_up(monkeypatch, tmp_path):
    clocked, ended = Clocked(), threading.Semaphore(0)
    monkeypatch.setattr(sampler_module, "_Process", clocked)
    sampler = Listening(tmp_path, clock=lambda: clocked.now)

    def ask(tenant, count):
        for _ in range(count):
            source = Source(tmp_path / "run", "00" * 32, tmp_path / tenant)
            submit(sampler, source, GREEDY, tenant, lambda *_: ended.release())

    try:
        clocked.goes_on.set()
        ask("north", 20)
        assert all(ended.acquire(timeout=DEADLINE_S) for _ in range(20))
        clocked.goes_on.clear()
        clocked.begun.clear()
        ask("north", 4)
        assert clocked.begun.wait(DEADLINE_S)
        ask("south", 4)
        clocked.goes_on.set()
        assert all(ended.acquire(timeout=DEADLINE_S) for _ in range(8))
    finally:
        clocked.goes_on.set()
        sampler.close()
    assert clocked.order[-8:] == ["north", "south"] * 4


def test_no_more_requests_wait_than_may(runs, sampler):
    refusal = submit(sampler(waiting=0), runs("whole"), GREEDY).outcome()
    assert isinstance(refusal, ServiceQueueFullError)
    assert refusal.retry_after_s > 0


def test_a_request_ends_where_no_process_can_be_started(tmp_path, sampler):
    """And the next one is tried again."""
    (tmp_path / "logs").write_text("no folder")
    service = sampler()
    for _ in range(2):
        outcome = submit(service, source_of(tmp_path, "00" * 32), GREEDY).outcome()
        assert (type(outcome), outcome.code) == (FutureFailedError, "sampler_failed")


def test_an_idle_process_ends(sampler, tmp_path):
    found = submit(sampler(idle_s=0.1), source_of(tmp_path, "00" * 32), GREEDY)
    assert found.outcome().code == "not_a_run"
    for thread in threading.enumerate():
        if thread.name == "sampler":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
    assert children() == []


def test_a_process_ends_with_a_service_that_is_killed(run_python_in, tmp_path):
    code = f"""
import os, signal, threading
from contextlib import suppress
from pathlib import Path
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.service.sampling.sampler import *
told, folder = threading.Event(), Path({str(tmp_path)!r})
sampler = Sampler(SamplerLimits(), folder, folder, lambda *_: None, lambda *_: None, lambda *_: told.set())
request = wire.Sample(prompts=["a"], max_tokens=3, top_p=1.0, completions=1)
sampler.submit("c.0", "north", "weights.safetensors", str(folder), request)
told.wait()
children = []
for each in Path("/proc/self/task").glob("*/children"):
    with suppress(OSError):  # a timer that has ended
        children += each.read_text().split()
(child,) = children
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run_python_in(tmp_path)("-c", code, deadline_s=DEADLINE_S)
    assert done.code == -signal.SIGKILL, done.stderr
    assert has_ended(int(done.stdout), DEADLINE_S), "it ended by itself"
