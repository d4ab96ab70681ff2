"""What a run does with texts in the place of records: those that span, start or vary, and those that votes choose."""
