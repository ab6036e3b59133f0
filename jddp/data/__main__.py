"""`python -m jddp.data tokenize` writes token files, `python -m jddp.data bench` times reading."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jddp.door import Parser, add_config_arguments, enter


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""

    def run() -> None:
        arguments = _parser().parse_args(argv)
        arguments.run(arguments)

    return enter(run)


def _parser() -> Parser:
    parser = Parser(prog="python -m jddp.data", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    tokenize = commands.add_parser("tokenize", help="write token files from text")
    add = tokenize.add_argument
    add("directory", type=Path, help="where to; holds none yet")
    add("texts", type=Path, nargs="+", help="files, folders, .jsonl with a document in each line")
    add("--tokenizer", default="bytes", help="bytes, or a file of Hugging Face's tokenizers")
    add("--end-of-document", metavar="TOKEN", help="what ends a document; zero for bytes")
    add("--test-share", type=float, default=0.1, help="of the documents (0.1)")
    add("--shard-tokens", type=int, default=2**27, help="tokens of a file (2^27)")
    tokenize.set_defaults(run=_tokenize)
    bench = commands.add_parser("bench", help="time each stage that batches go through")
    add_config_arguments(bench)
    bench.add_argument("--seconds", type=float, default=3.0, help="for each stage (3)")
    bench.set_defaults(run=_bench)
    return parser


def _tokenize(arguments: argparse.Namespace) -> None:
    from jddp.data.tokenize import Bytes, FromFile, documents_in, write_tokens

    end = arguments.end_of_document
    tokenizer = (
        Bytes()
        if arguments.tokenizer == "bytes"
        else FromFile(Path(arguments.tokenizer), end_of_document=end)
    )
    index = write_tokens(
        documents_in(arguments.texts),
        arguments.directory,
        tokenizer=tokenizer,
        test_share=arguments.test_share,
        shard_tokens=arguments.shard_tokens,
    )
    for part, num_tokens in index["tokens"].items():
        print(f"{part:5}  {index['documents'][part]:,} documents, {num_tokens:,} tokens")
    print(
        f"train with data.name=tokens data.dir={arguments.directory} "
        "data.kwargs.sequence_length=... , and a model of vocab_size "
        f"{index['vocab_size']:,}"
    )


def _bench(arguments: argparse.Namespace) -> None:
    from jddp.build import build
    from jddp.config import load_config

    config, name = load_config(arguments.config, arguments.overrides)
    job = build(config)
    print(f"{name}: {job.data.description}" if job.data else name)
    for stage, (step, close) in _stages(job).items():
        num_steps, seconds = _time(step, arguments.seconds)
        close()
        rate = num_steps * config.data.global_batch_size / seconds
        print(f"{stage:34} {rate:12,.0f} examples/s  {1e3 * seconds / num_steps:9.3f} ms a batch")


def _stages(job: Any) -> dict[str, tuple[Callable[[], Any], Callable[[], None]]]:
    """For each stage, what takes one batch through it, and what ends it."""
    import numpy as np

    from jddp.data.order import Order
    from jddp.trainer.source import Source

    config, examples, batches = job.config, job.data.train, job.train_batches()
    size, positions = config.data.global_batch_size, _positions(job)
    order = Order(len(examples), config.seed, config.data.shuffle)
    taken = order.examples_at(np.arange(size))
    source = Source(batches, job.ddp.put)
    source.start(2**62)

    def nothing() -> None:
        """Nothing to end."""

    def end() -> None:
        source.close()
        if hasattr(batches, "close"):
            batches.close()

    workers = config.data.num_workers
    through = f"on the devices, by {workers} workers" if workers else "on the devices, by a thread"
    return {
        "order": (lambda: order.examples_at(next(positions) + np.arange(size)), nothing),
        "read": (lambda: examples.take(taken), nothing),
        "order, read and augment": (lambda: batches.batch(next(positions)), nothing),
        through: (lambda: next(source), end),
    }


def _positions(job: Any) -> Iterator[int]:
    """Where batches of one epoch begin, again and again."""
    size = job.config.data.global_batch_size
    while True:
        yield from range(0, max(1, len(job.data.train) - size), size)


def _time(step: Callable[[], Any], seconds: float) -> tuple[int, float]:
    """Repeats a step for so long; the first is not counted."""
    step()
    num_steps, since = 0, time.perf_counter()
    while (passed := time.perf_counter() - since) < seconds or not num_steps:
        step()
        num_steps += 1
    return num_steps, passed


if __name__ == "__main__":
    sys.exit(main())
