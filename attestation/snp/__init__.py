"""The verifier of AMD SEV-SNP reports, and the launch measurement of a guest.

Doors: cert_table, launch_measurement, report, rules, verify.

May import: `trust` and the rooms below; `metrics`.
"""
