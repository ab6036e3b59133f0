"""The config of a run: sections of keys with types, ranges and defaults, each defined once.

    config, name = load_config(["fashion_mnist_cnn"], ["optimizer.learning_rate=0.01"])

`schema` and `options` hold the sections, `keys` walks them and describes each mistake in one line,
`files` reads and merges YAML files and overrides. JAX is not imported here, so a mistyped key does
not cost a start of JAX.
"""
