"""What Hu et al. (2026) prove of random projections, corrected where it is wrong, and the exact cost at rank one.

What the accountants need is in `privlora.accounting.projection`.
"""
