"""Can it run and what will it cost, from shapes alone."""
