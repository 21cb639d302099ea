"""Measurements that only raycloak's developers need: masks, words, clipped sums, walls around user code, starts,
steps, services, an adapter's block.

Doors: adapter, attest, bare_ray, checks, device_words, gpu_use, gradient, gradient_cases, mask, sandbox, service,
start, step, words.

May import: `encrypted`; `raycloak`.
"""
