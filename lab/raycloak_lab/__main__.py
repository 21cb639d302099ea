"""``python -m raycloak_lab`` is the command ``raycloak-lab``; both start here."""

from raycloak_lab.cli.app import main

if __name__ == "__main__":
    main()
