"""Privacy of random projections: the bounds of Hu et al. (2026) and exact accounting of their M2."""
