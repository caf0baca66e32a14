"""The flags of the commands, without torch: help and wrong flags are answered at once."""
