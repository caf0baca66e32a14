"""How the ranks of a run start, stop and end: torchrun, signals, exit codes, the watchdog."""
