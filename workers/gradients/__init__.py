"""Clipped sums: per-example gradients, their bound, the checks of a model, and the numerics class.

Doors: clipping, environment, gpus, gradient_parts, model_checks, model_report, numerics, placement, products, row_loss,
row_memory, spare_rows, streaming, sum_engines, vocabulary_loss.

May import: `models` and the rooms below; `attestation`, `metrics`.
"""
