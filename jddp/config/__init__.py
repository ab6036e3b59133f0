"""What a run is, as data: sections of keys with types, ranges and every default, once.

    config, name = load_config(["fashion_mnist_cnn"], ["optimizer.learning_rate=0.01"])

`schema` holds the sections and `keys` walks them, `files` reads and merges YAML files and
overrides, `mistakes` says in one line each what is wrong. JAX is not imported here, so a mistyped
key does not cost a start of JAX.
"""
