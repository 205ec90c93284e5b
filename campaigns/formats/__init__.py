"""Damage to every file that the library reads: each is read, or refused with a typed error."""
