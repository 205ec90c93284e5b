"""Closed-form bytes and seconds of whole steps: of votes, and of the alternatives to votes."""
