"""The loss on samples that are not trained on."""
