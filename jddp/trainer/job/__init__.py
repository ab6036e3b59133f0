"""Builds and runs the job that a config describes.

`parts` resolves the names in a config, `data` opens its data, and `build` makes a `Job` of them,
which runs. No package below this one knows a `Config`.
"""
