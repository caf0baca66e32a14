"""A hook: RUN/losses.csv with the losses of every validation, for a spreadsheet.

[job] hooks = ["examples.hook:LossTable"]
"""

from __future__ import annotations

from titan_dit.hooks import Hook, Run


class LossTable(Hook):
    """Written by the first rank alone."""

    rank0 = True

    def validated(self, run: Run) -> None:
        """One line per validation."""
        file = run.folder / "losses.csv"
        if not file.is_file():
            file.write_text("step,samples,loss,validation_loss\n")
        keys = ("step", "samples", "loss", "validation_loss")
        with file.open("a") as lines:
            lines.write(",".join(str(run.row[key]) for key in keys) + "\n")
