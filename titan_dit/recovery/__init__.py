"""How a run goes on: from a checkpoint, after bad steps, with every sample counted."""
