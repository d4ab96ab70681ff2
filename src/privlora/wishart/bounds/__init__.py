"""The bounds of Hu et al. (2026), corrected where they fail, and the exact cost of M2 where differences have rank one."""
