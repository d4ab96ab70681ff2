"""Which method a run takes: trials on public texts alone, before any record is read."""
