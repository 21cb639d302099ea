"""The plan and the manifest: turn configuration and public numbers into a mechanism, or refuse before any charge.

Doors: advice, batches, claim, correlated_noise, cross_check, data_check, dry_run, first_look, key_files, listed_code,
manifest, measurements, model_check, model_source, outlook, own_metrics, payer, plan, public_split, references, sealing,
search_cost.

May import: `ledger`, `aggregation` and the rooms below; `workers`, `attestation`, `metrics`.
"""
