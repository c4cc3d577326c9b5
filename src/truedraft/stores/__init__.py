"""What drafters look things up in: structures that take tokens and find them again in microseconds."""
