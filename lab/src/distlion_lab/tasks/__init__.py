"""Real training jobs: data and model, from embedded data up to a user's own."""
