"""The optimizer and what follows a step of it: clipping, learning rate, averages of the weights."""
