"""A map-style dataset, as a Trainer is given one."""

from typing import Any


class Given:
    """A map-style dataset of some items, with attributes of its own."""

    def __init__(self, items: Any, **attributes: Any) -> None:
        self._items = items
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]
