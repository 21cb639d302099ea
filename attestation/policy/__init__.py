"""The policy: which evidence a run accepts, its explanation in words, and the key policies that follow from it.

Doors: collateral_service, explain, key_policy, policy.
May import: simulators, gpu, snp, tdx, log, trust, files, core; metrics.
"""
