"""Settings of other tools, taken over where they mean the same here, and told of where they do not."""
