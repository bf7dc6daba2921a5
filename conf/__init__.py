"""The YAML that composes a served engine: a primary configuration per command, presets under `experiment/`."""
