"""Attacks on what privlora claims: canaries in steps and runs, membership inference, shadow models, lower bounds."""
