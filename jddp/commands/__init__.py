"""The commands: each parses its arguments and calls the function that does the work."""
