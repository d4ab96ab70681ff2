"""What M2 of Hu et al. (2026) costs, for gradients of any rank: curves and moments that the accountants compose."""
