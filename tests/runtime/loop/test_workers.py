"""Processes that read ahead give what the dataset has, in any order it is asked for, and name what they cannot read."""

import os

import numpy as np
import pytest

from lengthwise.core.batch import Pack
from lengthwise.core.errors import LengthwiseError
from lengthwise.runtime.loop.workers import ItemReaders


class Source:
    """A sequence is its id as often as it is long, and the process that read it."""

    def tokens(self, sequence):
        if sequence == 13:
            raise KeyError("no such row")
        return np.array([sequence] * sequence + [os.getpid()])


def labels(sequence):
    return np.arange(sequence)


def packs_of(*ids):
    return [Pack(ids=two, lengths=two) for two in ids]


@pytest.fixture(scope="module")
def readers():
    readers = ItemReaders(Source(), labels, num_workers=2)
    yield readers
    readers.close()


def assert_read(readers, sequence, *, by_others=True):
    tokens = readers.tokens(sequence)
    assert tokens[:-1].tolist() == [sequence] * sequence
    assert readers.labels(sequence).tolist() == list(range(sequence))
    assert (tokens[-1] != os.getpid()) == by_others


def test_the_micro_batches_of_every_step_come_from_the_processes_whatever_is_left_of_the_step_before(readers):
    readers.start(packs_of((3, 4), (5, 6), (7, 8), (9, 10), (2, 1)))
    for sequence in (4, 3, 4, 6, 10):  # a micro-batch may go unread, as where memory ran out
        assert_read(readers, sequence)
    readers.start(packs_of((3, 9), (9, 5)))
    for sequence in (3, 9, 5):
        assert_read(readers, sequence)
    readers.start([])
    assert_read(readers, 5, by_others=False)
    readers.start(packs_of((6, 2)))
    assert_read(readers, 2)
    assert_read(readers, 7, by_others=False)  # of no micro-batch


def test_an_item_that_cannot_be_read_is_named_at_its_micro_batch(readers):
    readers.start(packs_of((3, 4), (13, 5), (6, 7)))
    assert_read(readers, 3)
    with pytest.raises(LengthwiseError, match="item 13 could not be read: KeyError: 'no such row'"):
        readers.tokens(5)


def test_what_a_dataset_has_in_another_epoch_is_read_there():
    class Epoch(Source):
        epoch = 0

        def tokens(self, sequence):
            return np.array([self.epoch, os.getpid()])

    source = Epoch()
    readers = ItemReaders(source, None, num_workers=1, epoch=lambda: source.epoch)
    processes = []
    for source.epoch in (0, 0, 1):
        readers.start(packs_of((3, 4)))
        epoch, process = readers.tokens(3)
        assert epoch == source.epoch
        processes.append(process)
    assert processes[0] == processes[1] != processes[2]
    readers.close()
