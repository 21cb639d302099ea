"""TensorBoard: a folder of event files for each run of raycloak."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raycloak.coordinator.loggers.logger import Logger, settings_of, words_of
from raycloak.coordinator.training.callbacks import RunEnded, RunStarted

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(Logger):
    """Logs a run for TensorBoard: settings and numbers.

    After a resume it continues in the same folder; TensorBoard drops what the new execution repeats.

    Args:
        log_dir: folder in which the run gets one of its own, named as its run directory; without it, events lie in
            ``tensorboard`` in the run directory.

    Raises:
        ConfigError: ``logger_library`` without TensorBoard.
    """

    def __init__(self, log_dir: str | Path | None = None) -> None:
        super().__init__("tensorboard")
        self._log_dir = Path(log_dir) if log_dir is not None else None
        self._writer: SummaryWriter

    def _open(self, started: RunStarted) -> None:
        from torch.utils.tensorboard import SummaryWriter

        own = self._log_dir / started.run_dir.name if self._log_dir else started.run_dir / "tensorboard"
        # Points that an earlier execution logged after the step that this one starts from are logged again.
        again = started.finished_steps + 1 if started.finished_steps or own.exists() else None
        self._writer = SummaryWriter(str(own), purge_step=again)
        if again is None:
            settings = json.dumps(settings_of(started), indent=2)
            self._word("settings", "\n".join(f"    {line}" for line in settings.splitlines()))
            for name, word in words_of(started).items():
                self._word(name, word)
            self._word("marks", ", ".join(started.marks) or "none")

    def _numbers(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        # Each time, so that a page beside the run shows what there is.
        self._writer.flush()

    def _word(self, name: str, value: str) -> None:
        self._writer.add_text(name, value, self._step)

    def _close(self, ended: RunEnded, files: Sequence[Path], weights: Path | None) -> None:
        self._writer.close()
