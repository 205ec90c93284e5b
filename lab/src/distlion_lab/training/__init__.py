"""Training runs: settings, workers (local, or started by torchrun), the loop, and its record."""
