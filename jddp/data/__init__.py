"""Host batches of real examples, in an order that depends on nothing but the seed.

    source = make_source("fashion_mnist")           # has shapes, has read nothing
    data = source.load()                            # reads and checks the files
    for batch in TrainBatches(data.train, global_batch_size=128, seed=0, augment=source.augment):
        ...                                         # a dict of numpy arrays, endlessly

*Examples* are numbered rows (`examples`), an *order* maps positions of the run to examples
(`order`), *batches* cut the order into steps and processes (`batches`), and a *source* loads a
named data set. This package knows numpy and files, and nothing of JAX, devices or configs.
"""

from jddp.data.augment import Augment, CropAndFlip, FlipAndShift
from jddp.data.batches import TrainBatches, count_steps, eval_batches
from jddp.data.examples import ArrayExamples, Batch, Examples, ImageExamples
from jddp.data.rows import RowExamples, as_examples
from jddp.data.source import DataSet, Source, Spec, make_data_set, source_of, spec_of
from jddp.data.sources import SOURCES, make_source
from jddp.data.sources.arrays_on_disk import load_weights
from jddp.data.sources.tokens import TokenExamples
from jddp.data.workers import WorkerBatches

__all__ = [
    "SOURCES",
    "ArrayExamples",
    "Augment",
    "Batch",
    "CropAndFlip",
    "DataSet",
    "Examples",
    "FlipAndShift",
    "ImageExamples",
    "RowExamples",
    "Source",
    "Spec",
    "TokenExamples",
    "TrainBatches",
    "WorkerBatches",
    "as_examples",
    "count_steps",
    "eval_batches",
    "load_weights",
    "make_data_set",
    "make_source",
    "source_of",
    "spec_of",
]
