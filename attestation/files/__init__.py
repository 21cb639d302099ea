"""Files that survive a crash: private, whole, SQLite; and YAML that people write.

Doors: private, sqlite, whole, yaml_reader.

May import: `core`; `metrics`.
"""
