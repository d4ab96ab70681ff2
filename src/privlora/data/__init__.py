"""Private records in; Poisson-sampled, length-sorted micro-batches out."""
