"""The OpenAI API: HTTP in, requests to the engine out. It knows no engine and no command line."""
