"""What must stay as it was: programs, orders, names, and runs that an earlier commit wrote."""
