"""The command ``raycloak init``: a project of three files that runs at once, to be changed into one's own.

The files of each template lie below ``templates/`` as they are written. A project's `prepare` makes its tiny data.
"""

import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from raycloak.coordinator.console.output import Output
from raycloak.metrics.errors import ConfigError
from raycloak.metrics.file_errors import file_error

Template = Literal["tabular", "patients", "image", "text", "lora"]
FILES = ("config.yaml", "project.py", "README.md")


def init_command(
    output: Output,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New or empty folder.")],
    template: Annotated[Template, typer.Option(help="tabular, patients, image, text or lora.")],
) -> None:
    """Write a project of three files that trains on tiny public data at once, to be changed into your own."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("folder_not_empty", f"{folder} exists and is not empty.", "Name a new folder.")
    if template in ("text", "lora"):
        from raycloak.workers.inputs.hub_files import require_libraries

        require_libraries()
    write_project(folder, template)
    made = sorted(str(path.relative_to(folder)) for path in folder.iterdir() if path.name not in FILES)
    rows = [
        ("folder", str(folder)),
        ("to read and change", ", ".join(FILES)),
        ("tiny public data", ", ".join(made)),
        ("next", f"cd {folder}"),
        ("", "raycloak plan config.yaml"),
        ("", "raycloak run config.yaml"),
    ]
    output.show(f"Project ({template})", {"folder": folder, "files": FILES, "data": made}, rows)


def write_project(folder: Path, template: Template) -> None:
    """Write the files of ``template`` into ``folder``, and the data that its ``prepare`` makes.

    Raises:
        ConfigError: ``folder`` if the files cannot be written.
    """
    from raycloak.workers.inputs.user_code import resolve

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copyfile(Path(__file__).parent / "templates" / template / name, folder / name)
        resolve("project:prepare", folder)()
    except OSError as error:
        raise file_error("folder", "write", folder, error) from None
