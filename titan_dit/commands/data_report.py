"""`python -m titan_dit data report SET`: what became of every file that `data encode` found."""

from __future__ import annotations

from pathlib import Path

from titan_dit.commands.data_pack import summary
from titan_dit.commands.flags import DataReportFlags
from titan_dit.config.section import UserError
from titan_dit.observe import console
from titan_dit.pictures.report import by_bucket, read_report


def main(options: DataReportFlags) -> None:
    """Print a line for each file, then the buckets, and what was left out by reason."""
    path = Path(options.path)
    if not path.is_dir():
        raise UserError(
            f"[data report] path={path}: there is no such folder. Give one that `data encode` "
            "wrote."
        )
    reports = list(read_report(path))
    for report in reports:
        if report.reason or not options.left_out:
            console.say(str(report))
    for bucket, about in by_bucket(reports).items():
        console.say(f"bucket {bucket}: {about}")
    reasons = [report.reason for report in reports if report.reason]
    for line in summary(reasons):
        console.say(line)
    captioned = sum(bool(report.text) for report in reports if not report.reason)
    console.say(f"{len(reports) - len(reasons):,} encoded, {captioned:,} of them with a caption")
