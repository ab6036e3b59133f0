"""Pictures of a step, modelled or measured, as pages of HTML that load nothing.

`lanes` has the values that are drawn, `svg` draws the lanes, and `page` puts them beside tables.
"""
