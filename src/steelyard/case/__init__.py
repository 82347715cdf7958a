"""What is asked: the question, its precision, what may be tuned, and the request to run it."""
