"""Model architectures: which ones run here, their configuration, and the one native decoder."""
