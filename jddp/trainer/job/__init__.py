"""Builds and runs the job that a config describes.

`parts` resolves the names in a config, `data` opens its data, `build` puts the parts together, and
`job` runs them. No package below this one knows a `Config`.
"""
