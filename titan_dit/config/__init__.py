"""What a run is configured by: sections and keys, TOML and flags, names and what they stand for."""
