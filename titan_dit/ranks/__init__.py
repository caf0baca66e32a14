"""What every rank uses: process groups, failures, signals, the watchdog."""
