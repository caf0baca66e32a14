"""From noise to samples, given a callable; no model is known here."""
