"""The command line: parse, call one function, show."""

from distlion.cli.app import app

__all__ = ["app"]
