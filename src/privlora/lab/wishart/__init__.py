"""The studies of one paper, Hu et al. (2026), on Wishart projections: mechanism, bounds, heads and their canaries.

No run of `privlora train` needs any of it: there the paper's M2 is the method `wishart-m2`.
"""
