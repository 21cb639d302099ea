"""One test for a rule of many things, which names all that break it: a test of each would cost its own setup."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def offenders(things: Iterable[T], check: Callable[[T], object], name: Callable[[T], str] = str) -> dict[str, str]:
    """Return what each thing that fails ``check`` failed with, by its name; there is at least one thing to check."""
    found, every = {}, list(things)
    assert every, "a rule of nothing holds whatever it says"
    for each in every:
        try:
            check(each)
        except AssertionError as broken:
            found[name(each)] = str(broken)
    return found
