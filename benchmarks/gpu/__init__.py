"""The check of the device path: what a GPU computes, whether it keeps the proofs, and how fast it is.

``python -m benchmarks.gpu`` runs it; docs/gpu.md says how. The candidate kernels lie beside the check that judges
them. Nothing of the product imports this package, and a run never uses it.
"""
