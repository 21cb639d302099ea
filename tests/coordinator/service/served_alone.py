"""A training service in a process of its own: ``python -m tests.coordinator.service.served_alone FOLDER LIMITS``.

It prints its port, and ends with its input. Its drivers are scripted; see `tests.coordinator.service.serving`.
"""

import json
import sys
from pathlib import Path

from tests.coordinator.service.serving import Served


def main(folder, limits):
    """Serve until the input ends."""
    served = Served(Path(folder), limits=json.loads(limits))
    print(served.server.port, flush=True)
    sys.stdin.read()
    served.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
