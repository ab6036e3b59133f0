"""Tools that look at runs, machines and programs: found by entry points, nothing imports them."""
