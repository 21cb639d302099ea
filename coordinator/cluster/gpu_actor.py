"""The GPU sampler of one node, as an actor whose process imports nothing else of raycloak."""

from raycloak.coordinator.vaults.calls import Receiver
from raycloak.metrics.gpu_readings import GpuSampler


class NodeGpus(Receiver, GpuSampler):
    """A GpuSampler that answers calls."""
