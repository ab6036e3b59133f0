"""Opens runs that have ended from their directories, to evaluate and to predict."""
