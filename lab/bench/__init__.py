"""`turnout bench`: how fast a composed engine is, here or behind any OpenAI-compatible server."""
