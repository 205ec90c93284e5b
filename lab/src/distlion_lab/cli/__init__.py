"""The command line: parse options, call one function, show its result."""

from distlion_lab.cli.app import app

__all__ = ["app"]
