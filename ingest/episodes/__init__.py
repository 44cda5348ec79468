"""Episodes from events: pure, without input or output."""
