"""Starting and stopping ranks: torchrun's agent, signals, exit codes, the watchdog."""
