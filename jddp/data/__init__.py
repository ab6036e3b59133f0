"""Host batches of examples, in an order that depends only on the seed.

    source = make_source("fashion_mnist")           # knows the shapes; has read nothing
    data = source.load()                            # reads and checks the files
    for batch in TrainBatches(data.train, global_batch_size=128, seed=0, transforms=source.augment):
        ...                                         # a dict of numpy arrays, endlessly

*Examples* are numbered rows (`examples`), an *order* maps positions of the run to examples
(`order`), *batches* cut the order into steps and processes (`batches`), and a *source* loads a
named data set. This package knows numpy and files, and nothing of JAX, devices or configs.
"""

from jddp.data.batches import TrainBatches as TrainBatches
from jddp.data.batches import count_steps as count_steps
from jddp.data.batches import eval_batches as eval_batches
from jddp.data.examples import ArrayExamples as ArrayExamples
from jddp.data.examples import RowExamples as RowExamples
from jddp.data.order import MixtureOrder as MixtureOrder
from jddp.data.order import Order as Order
from jddp.data.periods import Epochs as Epochs
from jddp.data.source import DataSet as DataSet
from jddp.data.source import DataSource as DataSource
from jddp.data.source import make_data_set as make_data_set
from jddp.data.source import source_of as source_of
from jddp.data.sources import make_source as make_source
from jddp.data.sources.arrays import load_weights as load_weights
from jddp.data.workers import WorkerBatches as WorkerBatches
