"""Pipeline schedules as data; nothing here imports torch."""
