"""Figures and reports from records; nothing here trains."""
