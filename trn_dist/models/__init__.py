"""Models that the library brings along."""
