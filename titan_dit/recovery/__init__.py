"""Resume, rollback after bad steps, and the ledger of samples."""
