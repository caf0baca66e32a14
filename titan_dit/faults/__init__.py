"""What goes wrong while a run trains, and what is done about it."""
