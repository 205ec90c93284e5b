"""The command line: parse options, call one function, show its result."""

from distlion.lab.cli.app import app

__all__ = ["app"]
