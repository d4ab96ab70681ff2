"""One adapter from the records of several owners, none of which leave them: rules, clients, rounds, secure sums."""
