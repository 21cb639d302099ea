"""The input of a step: the model that it starts from, and the batches that a client sent for it."""

from collections.abc import Sequence

from raycloak.attestation.core.canonical import digest, length_prefixed


def step_input(parameters: bytes, batches: Sequence[bytes]) -> bytes:
    """Return the input digest, that a step's charge, receipt, header, noise, sampling and masks are bound to.

    Guarantee: other batches, fewer, more, or in another order, give another digest. Without batches, as in every step
    on registered data, it is the model digest itself.

    Args:
        parameters: digest of the parameters that the step starts from.
        batches: SHA-256 of each batch's bytes, in their order.
    """
    if not batches:
        return parameters
    return digest(length_prefixed("raycloak/step-input/v1", parameters, *batches))
