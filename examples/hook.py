"""A hook that writes the losses of every validation to RUN/losses.csv.

[job] hooks = ["examples.hook:LossTable"]
"""

from __future__ import annotations

from titan_dit.hooks import Hook, Run


class LossTable(Hook):
    """Runs on rank 0 only."""

    rank0 = True

    def validated(self, run: Run) -> None:
        """Append one line per validation."""
        file = run.folder / "losses.csv"
        if not file.is_file():
            file.write_text("step,samples,loss,validation_loss\n")
        keys = ("step", "samples", "loss", "validation_loss")
        with file.open("a") as lines:
            lines.write(",".join(str(run.row[key]) for key in keys) + "\n")
