"""One run: the parent, its workers, the measured loop, and the record made of them."""
