"""Importing pauses the collector, which never looks at what was imported."""

import gc
import json
from importlib import import_module

from raycloak.coordinator.quick_imports import quickly

IMPORTS = """
import gc, json
from raycloak.coordinator.quick_imports import quickly
with quickly():
    during = gc.isenabled()
    import email.mime.text
print(json.dumps([during, gc.isenabled(), gc.get_freeze_count() > 1000]))
"""


def test_what_was_imported_is_never_looked_at_again(run_python):
    done = run_python("-c", IMPORTS)
    assert json.loads(done.stdout) == [False, True, True], done.stderr


def test_a_process_that_has_everything_keeps_its_garbage_collectable():
    frozen = gc.get_freeze_count()
    with quickly():
        import_module("json")
    assert (gc.get_freeze_count(), gc.isenabled()) == (frozen, True)
