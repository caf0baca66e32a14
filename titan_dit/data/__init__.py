"""Sources of clean samples, the order they come in, and the loader."""
