"""Fair comparisons: a grid of ordinary runs, learning rates chosen apart from what is reported, tables and a page."""
