"""Text files to Megatron's indexed datasets. Worker processes import it: nothing imports torch."""
