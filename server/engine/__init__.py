"""The engine's own process and the pipe to it: tokens only, no text and no HTTP."""
