"""Privacy classes: what a value may depend on when it leaves a run."""

from enum import StrEnum


class PrivacyClass(StrEnum):
    """The way in which a metric or an event field depends on the private examples.

    DATA_INDEPENDENT: the same whatever the examples are, or a public fact about machines, configuration and plan.
    PHYSICAL: measured on a machine while it computes on the examples: a time, a power, a temperature. The number of
        operations is fixed, but the values of the operands may leave a weak trace. Not covered by epsilon.
    RELEASED: computed from what the mechanism has already released (parameters, public evaluation); charged for.
    SECRET: depends on the examples in any other way. It never leaves the process that knows it.
    """

    DATA_INDEPENDENT = "data_independent"
    PHYSICAL = "physical"
    RELEASED = "released"
    SECRET = "secret"

    @property
    def exportable(self) -> bool:
        """True if a value of this class may be shown outside the process that holds it."""
        return self is not PrivacyClass.SECRET
