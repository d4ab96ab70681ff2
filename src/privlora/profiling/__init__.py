"""Where the time and memory of a run's steps go: measured while it runs, as a page that stays private."""
