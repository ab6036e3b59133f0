"""Builds and runs the job that a config describes.

    run = fit("fashion_mnist_cnn", **{"optimizer.learning_rate": 0.01})
    model = load(run.run_dir)

`parts` resolves what a config names, `job` puts the parts together and runs them, `preview`
prints what a run would need, and `load` reads a finished run. No package below this one knows a
`Config`.
"""
