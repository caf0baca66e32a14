"""Checkpoints: file format, a run's series, storage back ends, the run lock."""
