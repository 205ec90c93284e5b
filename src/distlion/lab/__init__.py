"""Beside the library: what trains demos, compares, emulates networks, forecasts and draws."""
