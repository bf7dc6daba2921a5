"""From names to an engine: finds plugins, checks them against their contracts, composes the configuration, builds. The core
knows nothing of it: contracts and the step loop need no Hydra and no entry points."""
