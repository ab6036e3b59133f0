"""What must stay as it was: programs, orders, names, and runs that an earlier commit wrote.

`python -m golden.write` writes the files of `stored/` from the checkout that is imported, and
`test_golden` compares them with it. A file is written anew only where a change is meant, and the
commit that does so says what changes.
"""
