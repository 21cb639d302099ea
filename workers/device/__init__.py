"""The words of vectors, on the device that computes them: a CPU, or a GPU by Triton kernels with the CPU's bytes.

It hides where a vector lies, how its words are computed, and what is left of them in memory. A vector leaves its device
through `Words.masked` alone. `raycloak.workers.vectors` says what the words are.

Doors: step_clock, words.

May import: `terms` and the rooms below; `attestation`, `metrics`.
"""
