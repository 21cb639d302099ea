"""The index of evidence cases: read it, and judge each case by the verifier of its family.

Doors: check, index.
May import: appraisal, collateral, keys, attester, policy, simulators, gpu, snp, tdx, log, trust, files, core;
metrics.
"""
