"""`python -m hostile FORMAT SEED [NUMBER]`: read malformed files of one format again."""

import json
import sys
import tempfile
from pathlib import Path

from hostile import trials

with tempfile.TemporaryDirectory() as home:
    results = Path(home) / "results.jsonl"
    name, seed, number = sys.argv[1], int(sys.argv[2]), int([*sys.argv, 1][3])
    trials.main(home, [(name, seed, number)], results)
    seen = set()
    for line in results.read_text().splitlines():
        row = json.loads(line)
        if "begun" not in row:
            kind = str(row.get("wrong") or row).partition(": ")[2].partition(": ")[2]
            if kind not in seen or number == 1:
                print(row.get("wrong") or row)
            seen.add(kind)
            if number == 1:
                print(row.get("said", ""))
