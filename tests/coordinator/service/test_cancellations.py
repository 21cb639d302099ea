"""Cancellations that meet reports and commands on their way, lost drivers, lost places and a new service process."""

import random
from collections import deque

import pytest

from raycloak.attestation.processes.program import Exited
from raycloak.metrics.service_errors import ServiceError
from tests.coordinator.service.scripted import GIVEN, SENT
from tests.rounds import rounds

FB, OPT, SAVE = "forward_backward", "optim_step", "save_state"
STEPS = 6
RANDOM_ACTS = 150


class Line:
    """The line between a desk and the driver of its one client: commands and reports take their time on it."""

    def __init__(self, make_site, choose, config):
        self.make_site, self.choose = make_site, choose
        self.config, self.package_every = config, choose.choice([1, 2, 3])
        self.sent_examples = 0
        self.operations = []
        self.restart()
        self.client = self.site.create(config=config, steps=STEPS)

    def restart(self, world=None):
        """Begin with another process of the service, whose drivers are others too."""
        self.site = self.make_site(world=world, package_every=self.package_every)
        self.site.database.run("PRAGMA synchronous = OFF")
        self.site.keys = iter(range(self.choose.randrange(10**12), 10**13))
        self.commands, self.reports, self.pump = deque(), deque(), None
        self.site.drivers.send = lambda client, command: self.commands.append(command)

    @property
    def driver(self):
        return self.site.drivers.of.get(self.client)

    def move(self, what):
        """Move a command, a report or the driver itself; return whether there was anything to move."""
        driver = self.driver
        if driver is None:
            return False
        if what == "command" and self.commands:
            driver.take(self.commands.popleft())
        elif what == "report" and self.reports:
            self.tell(self.reports.popleft())
        elif what == "driver":
            self.pump = self.pump or driver.pump()
            report = next(self.pump, None)
            if report is None:
                self.pump = None
                return False
            self.reports.append(report)
        else:
            return False
        return True

    def tell(self, report):
        if isinstance(report, Exited):
            self.commands, self.reports, self.pump = deque(), deque(), None
        self.site.tell(self.client, report)

    def submit(self, kind):
        """Submit an operation; return it."""
        if kind == FB and self.config is SENT:
            self.sent_examples += 1
            operation = self.site.send(self.client, f"x{self.sent_examples}")
        else:
            operation = self.site.submit(self.client, kind)
        self.operations.append(operation)
        return operation

    def act(self):
        """Do something that a tenant, an operator or an accident does."""
        what = self.choose.choice([FB, FB, OPT, OPT, SAVE, "cancel", "cancel", "cancel", "lose", "evict", "restart"])
        rarely = self.choose.random() < 0.2
        try:
            if what == "cancel" and self.operations:
                self.site.cancel(self.choose.choice(self.operations[-4:]))
            elif what in (FB, OPT, SAVE):
                self.submit(what)
            elif what == "lose" and rarely and self.driver is not None:
                self.site.desk.drivers._lost.clear()  # however often it is lost
                self.tell(Exited(code=-9, last_words=""))
            elif what == "evict" and rarely and self.driver is not None:
                known = self.site.desk.drivers.of[self.client]
                known.is_ready = False
                known.place.leave(0.0)
                self.driver.stopped = True
            elif what == "restart" and rarely:
                self.restart(self.site.world)
        except ServiceError:
            pass  # it does not fit here

    def settle(self):
        """Move everything until nothing moves."""
        while any(self.move(what) for what in ("command", "driver", "report")):
            pass


@pytest.mark.parametrize("seed", range(rounds(20)))
@pytest.mark.parametrize("config", [GIVEN, SENT], ids=["registered", "sent"])
def test_guarantee_whatever_is_cancelled_every_operation_ends_and_no_step_is_charged_or_released_twice_or_unasked(
    make_site, config, seed
):
    line = Line(make_site, random.Random(seed), config)
    for _ in range(RANDOM_ACTS):
        if line.choose.random() < 0.3:
            line.act()
        else:
            line.move(line.choose.choice(["command", "driver", "report"]))
    line.settle()
    site, client = line.site, line.client
    assert site.store.open_operations(client) == []
    while site.store.client(client).steps.finished < STEPS:
        if site.store.client(client).steps.pending < 0:
            forward = line.submit(FB)
            line.settle()
            # Alone, since a caller may read its loss before it goes on.
            assert site.get(forward).state == "done"
        optim = line.submit(OPT)
        line.settle()
        assert site.get(optim).state == "done"
    row = site.store.client(client)
    assert (row.status, row.steps.charged) == ("LIVE", STEPS), "a step that nobody asked to release ends the client"
    for kind in ("charge", "release"):
        assert site.world.facts(row.run_dir, kind) == [[step] for step in range(STEPS)]
