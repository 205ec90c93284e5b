"""Bridges to what else trains: a few dozen lines each, imported by name."""
