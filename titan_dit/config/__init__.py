"""Configuration: sections, TOML and flags, catalog of names."""
