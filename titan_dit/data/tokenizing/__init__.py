"""Text files to Megatron's indexed datasets. Worker processes import it: it imports no torch."""
