"""Operating system and interpreter: file locks, streams, process identity, garbage collection."""
