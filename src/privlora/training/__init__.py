"""The loop: sample, accumulate, charge, release, update; with checkpoints that survive any crash."""
