"""The settings of a first run, proposed from a file of records and a model's name, or taken over from another tool."""
