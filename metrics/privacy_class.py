"""Privacy classes: what a value that leaves a run may depend on."""

from enum import StrEnum


class PrivacyClass(StrEnum):
    """The way in which a metric or an event field depends on the private examples.

    DATA_INDEPENDENT: the same whatever the examples are, or a public fact about machines, configuration and plan.
    RELEASED: computed from what the mechanism has already released (parameters, public evaluation); charged for.
    SECRET: depends on the examples in any other way. It never leaves the process that knows it.
    """

    DATA_INDEPENDENT = "data_independent"
    RELEASED = "released"
    SECRET = "secret"

    @property
    def exportable(self) -> bool:
        """True if a value of this class may be shown outside the process that holds it."""
        return self is not PrivacyClass.SECRET
