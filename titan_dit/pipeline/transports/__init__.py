"""How activations and gradients travel between pipeline ranks in run-time order."""
