"""The input of a step: the model that it starts from, the batches that a client sent for it, and the step before."""

from collections.abc import Sequence

from raycloak.attestation.core.canonical import digest, length_prefixed


def step_input(parameters: bytes, batches: Sequence[bytes], before: bytes = b"") -> bytes:
    """Return the input digest, that a step's charge, receipt, header, noise, sampling and masks are bound to.

    Guarantee: other batches, fewer, more, or in another order, give another digest. Without batches, as in every step
    on registered data, it is the model digest itself. Where sums are mixed, the digest fixes the inputs of all steps
    before, and so whom they drew: no other past has the same one.

    Args:
        parameters: digest of the parameters that the step starts from.
        batches: SHA-256 of each batch's bytes, in their order.
        before: input digest of the training step before, where noise is correlated; empty elsewhere, and for step 0.
    """
    if before:
        return digest(length_prefixed("raycloak/chained-input/v1", parameters, before))
    if not batches:
        return parameters
    return digest(length_prefixed("raycloak/step-input/v1", parameters, *batches))
