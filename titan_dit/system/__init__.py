"""What the operating system and the interpreter are asked for: files, locks, streams, processes."""
