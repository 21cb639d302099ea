"""Where the files of tests are: in memory, as far as the machine has room there."""

import os
import shutil
from pathlib import Path

MEMORY = Path("/dev/shm")
ROOM = 2**32
"""Several times what a whole run of the suite writes."""


def memory_folder() -> str:
    """Return a folder in memory, where a commit waits for no disk; `/tmp` where there is no room, or no program runs.

    No test cuts the power: what a killed process has written is there on either.
    """
    fits = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM
    return str(MEMORY) if fits and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC else "/tmp"
