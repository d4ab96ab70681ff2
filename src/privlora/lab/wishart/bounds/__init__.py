"""The bounds of Hu et al. (2026), corrected where they fail, and what M2 costs exactly at rank one."""
