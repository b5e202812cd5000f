"""The model: what a config.json means, where the weights lie, and one step as calls of `Ops`."""
