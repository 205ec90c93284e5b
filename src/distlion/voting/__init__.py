"""The step of workers that vote."""
