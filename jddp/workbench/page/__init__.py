"""`report.html`: a run on one page, with a verdict first.

    run directory ─► facts ─► verdict ─► page

`facts` reads what is there of a run directory, `verdict` judges it by rules, and `page` shows both.
A run that is running, broken or of another version has a page too.
"""
