"""Fixed-rank matrices as a manifold: points, tangent vectors, noise, retraction, transport. Tensors only."""
