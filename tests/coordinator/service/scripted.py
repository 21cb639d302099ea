"""A service without processes: the real desk and store, and drivers that follow commands as the real ones do.

What a scripted driver charges and releases goes to a file, which outlives it as a ledger and a run directory do.
"""

import hashlib
import json
from pathlib import Path

from raycloak.attestation.processes.failure import Failed
from raycloak.attestation.processes.program import Exited
from raycloak.attestation.sealed.sent_batch import SentHead
from raycloak.coordinator.client import service_pb2 as wire
from raycloak.coordinator.service.databases import open_database
from raycloak.coordinator.service.desk import Desk
from raycloak.coordinator.service.pipe import (
    Allow,
    Batches,
    Close,
    Computed,
    Copied,
    Copy,
    Ended,
    HeldStep,
    Load,
    Loaded,
    Opened,
    Over,
    PhaseBegun,
    Ready,
    Refused,
    ReleasedStep,
    Save,
    Saved,
)
from raycloak.coordinator.service.settings import ServiceSettings
from raycloak.coordinator.service.store import Store
from raycloak.metrics.errors import ConfigError

HASH = hashlib.sha256
GIVEN = {
    "model": "m:f",
    "dataset": "digits",
    "expected_batch_size": 8,
    "steps": 4,
    "dp_config": {"noise_multiplier": 1.0, "epsilon_cap": 3.0},
}
"""A client's configuration on a registered dataset."""
SENT = {
    **GIVEN,
    "dataset": {
        "kind": "sent",
        "shape": [4],
        "classes": 2,
        "max_participations": 2,
        "max_examples_per_step": 4,
    },
    "key_service": {"address": "keys.example.org:7443", "contract": "{}"},
}
KEYS = [SENT["key_service"]["address"]]
TEXT = {**GIVEN, "model": "gpt"}


def settings(**fields):
    """Return the settings of a service with the tenants north and south, whose tokens are their names."""
    tenant = {"datasets": ["digits", "open"], "models": ["gpt"], "code": ["m:f"], "key_services": KEYS}
    raw = {
        "bind": "127.0.0.1:0",
        "datasets": {
            "digits": {"dataset": {"kind": "digits"}},
            "open": {"dataset": {"kind": "digits", "public": True}},
        },
        "models": {"gpt": {"hf": "gpt2", "task": "causal_lm"}},
        "tenants": {
            name: {**tenant, "token_sha256": [{"sha256": HASH(name.encode()).hexdigest()}]}
            for name in ("north", "south")
        },
    }
    return ServiceSettings.model_validate({**raw, **fields})


def sealed_head(client_id, run_id, **fields):
    """Return the head of a sealed batch: the first one of step 0, with one example."""
    of_run = {"manifest_digest": b"m" * 32, "epoch": 0, "virtual_workers": 2, "row_bytes": 24, "salt": b"s" * 32}
    place = {"step": 0, "number": 0, "first": 0, "hashes": b"i" * 16}
    return SentHead(client_id=client_id, run_id=run_id, **of_run | place | fields)


class World:
    """The charges and releases of all runs, in files of one folder.

    Attributes:
        room: steps that an account has room for, or after which a run is stopped early.
        ending: of a run that has taken them.
        manifest: of every run, but for its id; empty unless a test has a real one.
        keeping: runs that keep the batches which were sent for them.
        load_refusal: code with which a load of a package is refused; none if empty.
    """

    def __init__(self, folder: Path, room: int = 10**6, ending: str = "cap_exceeded") -> None:
        self._folder = folder
        self.room = room
        self.ending = ending
        self.manifest = {}
        self.load_refusal = ""
        self.keeping = set()
        folder.mkdir(exist_ok=True)

    def new_run(self):
        """Return the id of a new run."""
        run_id = f"run{len(self.runs())}"
        (self._folder / run_id).touch()
        return run_id

    def note(self, run_id, *what):
        """Record a fact of a run."""
        with (self._folder / run_id).open("a") as file:
            file.write(json.dumps(what) + "\n")

    def facts(self, run_id, kind):
        """Return the facts of one kind, in order."""
        path = self._folder / run_id
        lines = path.read_text().splitlines() if path.exists() else []
        return [fact[1:] for fact in map(json.loads, lines) if fact[0] == kind]

    def runs(self):
        """Return the ids of all runs."""
        return sorted(path.name for path in self._folder.iterdir())

    def steps(self, run_dir):
        """See `Records`."""
        return {step: released(step) for (step,) in self.facts(run_dir, "release")}

    def keeps_batches(self, run_dir):
        """See `Records`."""
        return run_dir in self.keeping

    def package_bytes(self, location, package_digest):
        """See `Records`."""
        if "lost" in location:
            raise ConfigError("storage", "the package cannot be read.")
        return 1234


def digest(step):
    """Return the model digest of every run after ``step`` finished steps."""
    return f"{step:064x}"


def released(step):
    """Return the report of a released step."""
    return ReleasedStep(
        step=step,
        model_digest=digest(step + 1),
        epsilon=0.1 * (step + 1),
        seconds=0.5,
        evaluation_accuracy=None,
        evaluation_loss=None,
        loss=None,
    )


class ScriptedDriver:
    """A driver that does in :meth:`pump` what its commands allow, and reports it."""

    def __init__(self, world, begin, package_every) -> None:
        self.world, self.begin = world, begin
        self.run_id = begin.run_id or world.new_run()
        self.steps = begin.config["steps"]
        finished = len(world.facts(self.run_id, "release"))
        # A resume starts from the newest package, and repeats steps after it.
        self.position = finished - finished % package_every
        self.marks, self.due, self.files = (0, 0), [], {}
        self.held = self.held_told = False
        self.opened = self.told = self.over = self.ended = self.closed = self.stopped = False
        self.hangs = self.killed = False  # it does nothing, and was killed
        self.computed = -1

    def take(self, command):
        """Take a command."""
        match command:
            case Allow():
                assert self.over or command.computed >= self.marks[0]
                assert self.over or command.released >= self.marks[1]
                self.marks, self.held = (command.computed, command.released), command.held
                self.held_told = self.held_told and self.held
            case Batches():
                self.files[command.step] = command.files
            case Save() | Copy() | Load():
                self.due.append(command)
            case Close():
                self.closed = True

    @property
    def is_private(self):
        """Whether the run adds noise."""
        return self.begin.config["dp_config"]["enabled"]

    def pump(self):
        """Yield the next reports, as far as commands allow it."""
        if self.killed and not self.ended:
            self.ended = True
            yield Exited(code=-9, last_words="")
        if self.ended or self.hangs:
            return
        if not self.told:
            self.told = True
            self.world.note(self.run_id, "begin")
            yield from (
                PhaseBegun(words="admitting"),
                Opened(run_id=self.run_id, run_dir=Path(self.run_id)),
                self.ready(),
            )
        while not (self.ended or self.stopped):
            if self.due and self.due[0].after <= self.position:
                yield self.between(self.due.pop(0))
            elif not self.over and self.position < min(self.marks[0], self.steps):
                if self.computed < self.position:
                    if not self.held and (paid := self.charge()) is not None:
                        # A cancellation may come while it computes.
                        yield paid
                    if self.over:
                        continue
                    if not self.held:
                        yield self.compute()
                    elif self.held_told:
                        break
                    else:
                        yield self.hold()
                elif self.position < self.marks[1]:
                    yield self.release()
                else:
                    break
            else:
                break
        if not self.ended and (self.stopped or self.closed):
            self.ended = True
            yield Ended(ending="complete" if self.closed and self.position == self.steps else "stopped", metrics=None)
        if self.ended:
            yield Exited(code=0, last_words="")

    def ready(self):
        """Return the report that members are admitted."""
        return Ready(
            finished_steps=self.position,
            steps=self.steps,
            charged_steps=len(self.world.facts(self.run_id, "charge")),
            delta=1e-5,
            epsilon_cap=3.0,
            epsilon_planned=2.0,
            epsilon=0.0,
            noise_multiplier=1.0,
            sample_rate=0.01,
            max_grad_norm=1.0,
            accountant="pld",
            private=self.is_private,
            virtual_workers=8,
            evidence_class="simulated",
            account="digits",
            manifest={**self.world.manifest, "run_id": self.run_id},
        )

    def charge(self):
        """Charge the next step, if it is not charged."""
        step = self.position
        charged = [each for (each,) in self.world.facts(self.run_id, "charge")]
        if step not in charged:
            if len(charged) >= self.world.room:
                self.over = True
                return Over(ending=self.world.ending)
            assert charged == list(range(step)), "a step is charged in its order"
            self.world.note(self.run_id, "charge", step)
            return PhaseBegun(words="computing")
        return None

    def hold(self):
        """Leave the step that is held."""
        self.held_told = True
        self.marks = self.marks[0], min(self.marks[1], self.position)
        charged = [self.position] in [list(each) for each in self.world.facts(self.run_id, "charge")]
        return HeldStep(step=self.position, epsilon=0.1 * (self.position + 1) if charged and self.is_private else None)

    def compute(self):
        """Compute the step."""
        step = self.computed = self.position
        if self.is_private:
            return Computed(step=step, epsilon=0.1 * (step + 1), loss=None)
        return Computed(step=step, epsilon=None, loss=0.25, tokens=12)

    def release(self):
        """Reduce and release the step."""
        step = self.position
        if (step,) not in map(tuple, self.world.facts(self.run_id, "release")):
            self.world.note(self.run_id, "release", step)
        self.position += 1
        return released(step) if self.is_private else released(step).model_copy(update={"loss": 0.25, "grad_norm": 1.5})

    def between(self, command):
        """Save, copy or load."""
        if self.position == 0 and isinstance(command, Save | Copy):
            return Refused(id=command.id, code="no_state", message="no step is finished.", remedy="")
        if isinstance(command, Load) and self.world.load_refusal:
            return Refused(id=command.id, code=self.world.load_refusal, message="it is refused.", remedy="")
        if isinstance(command, Load):
            self.world.note(self.run_id, "load", command.id, command.package)
            return Loaded(id=command.id, model_digest=command.package.rpartition("-")[2], step=self.position)
        if isinstance(command, Copy):
            command.path.parent.mkdir(parents=True, exist_ok=True)
            command.path.write_text(digest(self.position))
            return Copied(id=command.id, model_digest=digest(self.position))
        self.world.note(self.run_id, "save", command.id)
        return Saved(
            id=command.id,
            package=f"{self.run_id}/package-{digest(self.position)}",
            package_digest="ab" * 32,
            model_digest=digest(self.position),
            step=self.position,
        )


class ScriptedDrivers:
    """All drivers of a desk."""

    def __init__(self, world, package_every=1) -> None:
        self.world, self.package_every = world, package_every
        self.of, self.hanging = {}, set()  # drivers by client, and clients whose drivers hang from the start

    def start(self, client_id, begin):
        """See `DriverPort`."""
        assert client_id not in self.of, "a client has one driver"
        self.of[client_id] = ScriptedDriver(self.world, begin, self.package_every)
        self.of[client_id].hangs = client_id in self.hanging

    def send(self, client_id, command):
        """See `DriverPort`."""
        if client_id in self.of:
            self.of[client_id].take(command)

    def stop(self, client_id):
        """See `DriverPort`."""
        if client_id in self.of:
            self.of[client_id].stopped = True

    def kill(self, client_id):
        """See `DriverPort`."""
        if client_id in self.of:
            self.of[client_id].killed = True


class ScriptedSampler:
    """A sampler that keeps what it is asked."""

    def __init__(self) -> None:
        self.asked, self.cancelled = {}, []

    def submit(self, operation_id, tenant, package, run_dir, request):
        """See `SamplerPort`."""
        self.asked[operation_id] = (package, run_dir, request)

    def cancel(self, operation_id):
        """See `SamplerPort`."""
        self.cancelled.append(operation_id)


class Counted:
    """The operations that a desk counted as ended."""

    def __init__(self) -> None:
        self.counted = []

    def operation_ended(self, kind, outcome, queued_s, running_s):
        """See `Measured`."""
        self.counted.append((kind, outcome))


class Site:
    """A desk with its store, as one process of a service has them.

    Args:
        url: of the store.
    """

    def __init__(self, folder, url=None, world=None, package_every=1, clock=lambda: 1000.0, database=None, **fields):
        self.folder = folder
        self.now = 0.0
        self.world = world or World(folder / "world")
        self.database = database or open_database(url or f"sqlite:///{folder / 'store' / 's.sqlite'}")
        self.store = Store(self.database)
        self.drivers = ScriptedDrivers(self.world, package_every)
        self.sampler, self.ended, self.published = ScriptedSampler(), Counted(), []
        self.batches = folder / "batches"
        self.batches.mkdir(exist_ok=True)
        self.desk = Desk(
            settings(**fields),
            folder,
            self.store,
            self.drivers,
            self.sampler,
            self.batches,
            self.published.extend,
            self.ended,
            self.world,
            folder / "key.pub",
            clock,
            lambda: self.now,
        )
        self.keys = iter(range(10**6))
        self.ask(self.desk.begin)

    def ask(self, call, *arguments):
        """Make one call of the desk in a turn of its own."""
        with self.desk.book.turn():
            return call(*arguments)

    def create(self, tenant="north", config=GIVEN, key=None, **fields):
        """Create a client; return its id."""
        request = wire.CreateClientRequest(
            idempotency_key=key or f"k{next(self.keys)}", config_json=json.dumps({**config, **fields})
        )
        return self.ask(self.desk.create_client, tenant, request).client_id

    def submit(self, client_id, kind, tenant="north", key=None, **fields):
        """Submit an operation."""
        payload = {
            "forward_backward": wire.ForwardBackward,
            "optim_step": wire.OptimStep,
            "save_state": wire.SaveState,
            "load_state": wire.LoadState,
            "sample": wire.Sample,
        }[kind](**fields)
        request = wire.SubmitRequest(
            client_id=client_id, idempotency_key=key or f"k{next(self.keys)}", **{kind: payload}
        )
        return self.ask(self.desk.submit, tenant, request)

    def send(self, client_id, *ids, tenant="north", key=None):
        """Send a batch of examples with these ids."""
        head, file = self.batch(client_id, *ids, key=key)
        return self.ask(self.desk.accept_batch, tenant, head, file, self.sealed(head))

    def sealed(self, head, **fields):
        """Return the head of a batch as its owner seals it for the place that comes next."""
        client = self.store.client(head.client_id)
        earlier = self.store.batches_from(head.client_id, client.steps.submitted_steps)
        place = {"step": client.steps.submitted_steps, "number": len(earlier), "first": client.steps.sent_examples}
        return sealed_head(head.client_id, client.run_id, hashes=head.example_hashes, **place | fields)

    def batch(self, client_id, *ids, key=None):
        """Return the head of a batch, and its file's name."""
        number = next(self.keys)
        file = f"{client_id}/{number}"
        (self.batches / client_id).mkdir(exist_ok=True)
        (self.batches / file).write_bytes(b"secret")
        head = wire.BatchHead(
            client_id=client_id,
            idempotency_key=key or f"k{number}",
            examples=len(ids),
            example_hashes=b"".join(HASH(each.encode()).digest()[:16] for each in ids),
            bytes=6,
            sha256=HASH(b"secret").digest(),
        )
        return head, file

    def get(self, operation, tenant="north"):
        """Return an operation as it is now."""
        return self.ask(self.desk.operation, tenant, operation.client_id, operation.operation_id)

    def client(self, client_id, tenant="north"):
        """Return a client as it is now."""
        return self.ask(self.desk.client, tenant, client_id)

    def cancel(self, operation, tenant="north"):
        """Cancel an operation."""
        return self.ask(self.desk.cancel, tenant, operation.client_id, operation.operation_id)

    def tell(self, client_id, report):
        """Make a report of a driver."""
        if isinstance(report, Exited):
            del self.drivers.of[client_id]
        self.ask(self.desk.reports.report, client_id, report)

    def fail(self, client_id, code="worker_error"):
        """Have a driver fail."""
        driver = self.drivers.of[client_id]
        driver.ended = True
        failed = Failed(error="RunFailedError", code=code, message="it broke.", remedy="Look.", epsilon=0.5, step=1)
        self.tell(client_id, failed)
        self.tell(client_id, Exited(code=4, last_words=""))

    def run(self):
        """Have all drivers do what they may, until none can do more."""
        busy = True
        while busy:
            busy = False
            for client_id, driver in list(self.drivers.of.items()):
                for report in driver.pump():
                    busy = True
                    self.tell(client_id, report)

    def close(self):
        """Give the store up."""
        self.store.close()
