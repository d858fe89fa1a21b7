"""What is measured, one file a question. Each takes a room and returns its figures."""
