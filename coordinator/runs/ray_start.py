"""The start of Ray for a run, before the libraries of a run are loaded: those take a second, as Ray's processes do.

Imports no torch. Each process of a local Ray inherits the environment of a worker, so all are started once and ahead.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raycloak.coordinator.cluster.actors import NO_GPU, connect, disconnect, is_connected
from raycloak.coordinator.config.run import RunConfig
from raycloak.workers.gradients.environment import own_flags, widest_shared, worker_environment

_ahead = threading.Event()
"""Set while Ray is there for an execution that has not begun; Ray, too, is there once in a process."""


def start_ray(config: RunConfig, phase: Callable[[str], None]) -> bool:
    """Join the cluster of RAY_ADDRESS, or start a local one; return whether the caller has to disconnect.

    An execution takes over the Ray that was started ahead of it. One that is resumed after it starts its own, since
    it may have lost that one.

    Args:
        phase: told that this phase begins, if there is anything to do.

    Raises:
        ConfigError: as `raycloak.coordinator.cluster.actors.connect`.
    """
    if _ahead.is_set():
        _ahead.clear()
        return True
    if is_connected():
        return False
    phase("connecting to Ray")
    # A Ray that is started here has this machine's CPUs alone.
    capability = widest_shared([own_flags()]) if config.cpu_capability == "auto" else config.cpu_capability
    environment = worker_environment(capability, config.threads_per_worker)
    # Ray counts the GPUs that it sees, so a run that uses some hides them from each process instead.
    if not config.use_gpu:
        environment |= NO_GPU
    return connect(config.num_workers + 1, environment)


@contextmanager
def ray_ahead(config: RunConfig, phase: Callable[[str], None]) -> Iterator[None]:
    """Start Ray as :func:`start_ray` for the execution inside the block; for the main thread of a command.

    SIGTERM ends the process at once until the run takes it over: nothing has begun.
    """
    if not start_ray(config, phase):
        yield
        return
    _ahead.set()
    # Ray's own handler would end the process with a dump of its stack.
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        if _ahead.is_set():
            _ahead.clear()
            disconnect()
        signal.signal(signal.SIGTERM, former)
