"""``python -m coordinator`` is the command ``raycloak``."""

from coordinator.cli import main

if __name__ == "__main__":
    main()
