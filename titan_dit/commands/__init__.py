"""The commands of `python -m titan_dit`, one file each."""
