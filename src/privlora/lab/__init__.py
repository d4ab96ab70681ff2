"""A wing that no run needs: studies, diagnostics, projections (Hu et al. 2026), audits of a mechanism by itself."""
