"""The command line: parse, call one function, show."""

from distlion.lab.cli.app import app

__all__ = ["app"]
