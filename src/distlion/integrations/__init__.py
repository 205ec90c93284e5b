"""Bridges to training frameworks: one small module each, imported by name."""
