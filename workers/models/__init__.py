"""The user's model and loss: built, fed, mended, adapted, and known by what they hold.

Doors: compute_mode, dropout, fed_by_name, held_values, hub_model, liger, losses, model_fixes, models, text_model.

May import: `inputs` and the rooms below; `attestation`, `metrics`.
"""
