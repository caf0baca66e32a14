"""What a run carries from step to step: optimizer, EMA, checkpoints."""
