"""A config becomes objects, and the objects a run.

    run = fit("fashion_mnist_cnn", **{"optimizer.learning_rate": 0.01})
    model = load(run.run_dir)

`parts` resolves what a config names, `job` puts the parts together and runs them, `preview` says
what a run would need, and `load` reads a run that is over. Nothing below this room has heard of a
`Config`.
"""
