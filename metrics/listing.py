"""The names in a sentence of an error or a note: the first ones of many."""

from collections.abc import Sequence


def listed(names: Sequence[str], most: int = 20) -> str:
    """Return the first ``most`` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def all_listed(names: Sequence[str]) -> str:
    """Return all of one or more names, the last behind "and"."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
