"""Public texts: who writes them, in which words they are asked for, populations, embeddings, and votes on them."""
