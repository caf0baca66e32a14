"""Pipelines: schedules as data, executors that run them, transports, timelines."""
