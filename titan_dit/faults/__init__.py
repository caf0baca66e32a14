"""What keeps a run alive: orderly stops, the watchdog, restarts."""
