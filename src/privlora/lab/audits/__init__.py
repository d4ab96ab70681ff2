"""Audits of a mechanism by itself: one step, whole runs, the duties of a space of gradients."""
