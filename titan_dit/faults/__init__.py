"""What goes wrong while a run trains, and what keeps it going."""
