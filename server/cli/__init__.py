"""The command line: composes the configuration and starts what was asked for."""
