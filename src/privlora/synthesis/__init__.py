"""Public texts: who writes them, in which words they are asked for, populations of them, and embeddings."""
