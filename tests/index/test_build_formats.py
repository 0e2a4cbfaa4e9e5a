"""Every sliced format goes on after a kill, with any number of workers, to the same bytes."""

import numpy as np
import pytest

from lengthwise.index import worker_pool as pool
from lengthwise.index.build import build_index
from lengthwise.index.settings import IndexSettings
from tests.index.build import build, files_of, write_tree
from tests.index.readers.test_arrow import pa, save
from tests.index.readers.test_megatron import write_pair
from tests.index.readers.test_webdataset import write_tar

TEXTS = [f"document {number} " * (1 + number % 13) for number in range(60)]


def write_source(folder, kind):
    if kind == "saved":
        table = pa.table({"text": TEXTS})
        return save(folder / "saved", [table.slice(0, 35), table.slice(35)])
    if kind == "megatron":
        return write_pair(folder / "corpus", [[[*text.encode()]] for text in TEXTS])
    if kind == "tar":
        for number in range(3):
            members = [(f"{id}.txt", text.encode()) for id, text in enumerate(TEXTS) if id % 3 == number]
            write_tar(folder / "shards" / f"{number}.tar{'.gz' * (number == 1)}", members)
        return folder / "shards"
    bases = np.frombuffer(b"ACGTN", dtype=np.uint8)[np.random.default_rng(0).integers(0, 5, 6000)].tobytes()
    records = [b">%d\n%s\n" % (id, bases[id * 150 : id * 150 + 101 + id]) for id in range(40)]
    return write_tree(folder / "dna", {"a.fa": b"".join(records)}) / "a.fa"


CASES = {"saved": {}, "megatron": {}, "tar": {}, "kmers": {"tokenizer": "6mer/4"}}


def interrupted(source, out, monkeypatch, **options):
    """Build until four units are done."""
    real, built = pool.build_part, []

    def build_part(job, unit):
        if len(built) == 4:
            raise KeyboardInterrupt
        built.append(real(job, unit))

    with monkeypatch.context() as patch:
        patch.setattr(pool, "build_part", build_part)
        with pytest.raises(KeyboardInterrupt):
            build(source, out, unit_bytes=900, **options)


@pytest.mark.parametrize("kind", CASES)
def test_an_interrupted_build_goes_on_to_the_same_bytes(tmp_path, monkeypatch, kind):
    source = write_source(tmp_path, kind)
    undisturbed = files_of(build(source, tmp_path / "undisturbed", unit_bytes=900, **CASES[kind]).path)
    interrupted(source, tmp_path / "out", monkeypatch, **CASES[kind])
    settings = IndexSettings(source=source, unit_bytes=900, **CASES[kind])
    assert build_index(settings, tmp_path / "out", workers=1).num_resumed_units == 4
    assert files_of(tmp_path / "out") == undisturbed
    assert build_index(settings, tmp_path / "out", workers=1).was_up_to_date


@pytest.mark.deep
@pytest.mark.parametrize("kind", CASES)
def test_the_number_of_workers_does_not_change_a_byte(tmp_path, kind):
    source = write_source(tmp_path, kind)
    one, two = (build(source, tmp_path / f"{n}", unit_bytes=900, workers=n, **CASES[kind]).path for n in (1, 2))
    assert files_of(one) == files_of(two)
