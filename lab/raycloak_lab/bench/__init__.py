"""Measurements that only raycloak's developers need: masks, clipped sums, starts, steps, services, an adapter's block.

Doors: adapter, attest, bare_ray, gradient, gradient_cases, mask, service, start, step.

May import: `encrypted`; `raycloak`.
"""
