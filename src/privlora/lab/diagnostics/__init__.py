"""The diagnostics of PRISM's paper: what a gauge, the noise and a preconditioner do to a private run."""
