"""The words of vectors on the device that computes them, with the same bytes on each; and rows that a GPU forms.

It hides where a vector lies, how its words are computed, and what is left of them in memory. A vector leaves its device
through `Words.masked` alone. `raycloak.workers.vectors` says what the words are. Rows are the parts of gradients that a
GPU's own kernel measures and adds.

Doors: compiler, rows, step_clock, words.

May import: `terms` and the rooms below; `attestation`, `metrics`.
"""
