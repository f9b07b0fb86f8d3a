import hashlib
import json
import shutil

import h5py
import numpy as np
import pytest

from trn_dist.data.shards import KEYS, Manifest, ManifestShard, ShardSet, write_shard
from trn_dist.errors import DataError

# The layout of the published shards, as NVIDIA's preparation writes it.
LAYOUT = {
    "input_ids": ("int32", ("S",)),
    "input_mask": ("int8", ("S",)),
    "segment_ids": ("int8", ("S",)),
    "masked_lm_positions": ("int32", ("P",)),
    "masked_lm_ids": ("int32", ("P",)),
    "next_sentence_labels": ("int8", ()),
}


def make_columns(size=3, seq_len=16, max_predictions=4):
    widths = {"S": seq_len, "P": max_predictions}
    rng = np.random.default_rng(size)
    return {key: rng.integers(0, 100, (size, *(widths[axis] for axis in axes))) for key, (_, axes) in LAYOUT.items()}


def write_raw(path, columns):
    with h5py.File(path, "w") as file:
        for key, column in columns.items():
            file[key] = column


def make_manifest(*shards):
    return Manifest(
        library_version="1", counts={"documents": 2}, vocab_size=77, vocab_sha256="00", settings={}, shards=shards
    )


def test_written_shard_has_the_published_layout(tmp_path):
    columns = make_columns(size=2000)
    write_shard(tmp_path / "training_0.hdf5", columns)
    with h5py.File(tmp_path / "training_0.hdf5") as file:
        assert sorted(file) == sorted(LAYOUT) == sorted(KEYS)
        for key, (dtype, _) in LAYOUT.items():
            assert file[key].dtype == dtype
            assert file[key].compression == "gzip"
            np.testing.assert_array_equal(file[key][()], columns[key])


def test_equal_columns_give_equal_bytes_and_nothing_beside(tmp_path):
    for name in ("a.hdf5", "b.hdf5"):
        write_shard(tmp_path / name, make_columns())
    assert (tmp_path / "a.hdf5").read_bytes() == (tmp_path / "b.hdf5").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.hdf5", "b.hdf5"]


def test_failed_write_leaves_nothing(tmp_path):
    columns = make_columns()
    del columns["next_sentence_labels"]
    with pytest.raises(KeyError):
        write_shard(tmp_path / "training.hdf5", columns)
    assert list(tmp_path.iterdir()) == []


def test_published_names_are_found_in_the_order_of_names(tmp_path):
    for i in (2, 10, 0):
        write_shard(tmp_path / f"wikicorpus_en_training_{i}.hdf5", make_columns(size=i + 1))
    write_shard(tmp_path / "wikicorpus_en_test_0.hdf5", make_columns())
    shards = ShardSet.open(tmp_path)
    assert [shard.path.name[len("wikicorpus_en_training_") :] for shard in shards.shards] == [
        "0.hdf5",
        "10.hdf5",
        "2.hdf5",
    ]
    assert shards.sizes.dtype == np.int64
    assert shards.sizes.tolist() == [1, 11, 3]
    assert (shards.num_samples, shards.seq_len, shards.max_predictions) == (15, 16, 4)
    assert shards.vocab_size is None


def test_read_returns_the_whole_shard_in_its_own_dtypes(tmp_path):
    columns = {key: column.astype("int16") for key, column in make_columns().items()}
    write_raw(tmp_path / "training.hdf5", columns)
    for key, column in ShardSet.open(str(tmp_path)).read(0).items():
        assert column.dtype == np.int16
        np.testing.assert_array_equal(column, columns[key])


def test_fingerprint_depends_on_names_and_shapes_but_not_on_the_directory(tmp_path):
    for name in ("one", "two", "renamed", "longer"):
        (tmp_path / name).mkdir()
    write_shard(tmp_path / "one" / "training_0.hdf5", make_columns())
    write_shard(tmp_path / "two" / "training_0.hdf5", make_columns())
    write_shard(tmp_path / "renamed" / "training_1.hdf5", make_columns())
    write_shard(tmp_path / "longer" / "training_0.hdf5", make_columns(size=4))
    one, two, renamed, longer = (
        ShardSet.open(tmp_path / name).fingerprint for name in ("one", "two", "renamed", "longer")
    )
    assert one == two
    assert len({one, renamed, longer}) == 3
    assert one == hashlib.sha256(b'[["training_0.hdf5", 3, 16, 4, null]]').hexdigest()


def test_fingerprint_covers_the_recorded_hashes(tmp_path):
    write_shard(tmp_path / "training_0.hdf5", make_columns())
    fingerprints = set()
    for sha256 in ("aa", "bb"):
        make_manifest(ManifestShard("training_0.hdf5", 3, sha256)).write(tmp_path)
        fingerprints.add(ShardSet.open(tmp_path).fingerprint)
    assert len(fingerprints) == 2


def test_manifest_round_trip(tmp_path):
    manifest = make_manifest(ManifestShard("training_0.hdf5", 3, "aa"))
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    write_shard(tmp_path / "training_0.hdf5", make_columns())
    assert ShardSet.open(tmp_path).vocab_size == 77


def test_no_shards(tmp_path):
    with pytest.raises(DataError, match=r"holds no shards \(\*training\*\.hdf5\): .*trn-dist data prepare --input"):
        ShardSet.open(tmp_path)
    with pytest.raises(DataError, match="missing is not a directory: make some with"):
        ShardSet.open(tmp_path / "missing")
    make_manifest(ManifestShard("training_0.hdf5", 3, "aa")).write(tmp_path)
    with pytest.raises(DataError, match="holds no shards .*though its manifest.json lists 1: copy"):
        ShardSet.open(tmp_path)


@pytest.mark.parametrize("key", KEYS)
def test_missing_key(tmp_path, key):
    columns = make_columns()
    del columns[key]
    write_raw(tmp_path / "training_7.hdf5", columns)
    with pytest.raises(DataError, match=rf"training_7\.hdf5 lacks the key '{key}' \(it has .*"):
        ShardSet.open(tmp_path)


@pytest.mark.parametrize("key", KEYS[1:])
def test_unequal_lengths(tmp_path, key):
    columns = make_columns()
    columns[key] = columns[key][:2]
    write_raw(tmp_path / "training_7.hdf5", columns)
    with pytest.raises(DataError, match=rf"training_7\.hdf5: key '{key}' has shape \(2,.*the other keys ask for \(3,"):
        ShardSet.open(tmp_path)


def test_wrong_width_rank_and_dtype(tmp_path):
    path = tmp_path / "training_7.hdf5"
    good = make_columns()
    for key, column, message in (
        ("segment_ids", good["segment_ids"][:, :8], r"key 'segment_ids' has shape \(3, 8\)"),
        ("masked_lm_ids", good["masked_lm_ids"][:, 0], r"'masked_lm_ids' holds int64 .* integers of 2 dimensions$"),
        ("next_sentence_labels", good["input_ids"], r"'next_sentence_labels' holds .* integers of 1 dimension$"),
        ("input_ids", good["input_ids"] * 1.0, r"key 'input_ids' holds float64 of shape \(3, 16\)"),
    ):
        write_raw(path, {**good, key: column})
        with pytest.raises(DataError, match=message):
            ShardSet.open(tmp_path)


def test_empty_shard(tmp_path):
    write_raw(tmp_path / "training_7.hdf5", make_columns(size=0))
    with pytest.raises(DataError, match=r"training_7\.hdf5: key 'input_ids' is empty"):
        ShardSet.open(tmp_path)


@pytest.mark.parametrize(("field", "key"), [("seq_len", "input_ids"), ("max_predictions", "masked_lm_positions")])
def test_shards_of_different_shapes(tmp_path, field, key):
    write_shard(tmp_path / "training_0.hdf5", make_columns())
    write_shard(tmp_path / "training_1.hdf5", make_columns(**{field: 8}))
    with pytest.raises(DataError, match=rf"training_1\.hdf5: key '{key}' is 8 wide, but .* same {field}"):
        ShardSet.open(tmp_path)


def test_not_hdf5(tmp_path):
    (tmp_path / "training_7.hdf5").write_bytes(b"")
    with pytest.raises(DataError, match=r"training_7\.hdf5 is damaged or not HDF5 .*copy or prepare"):
        ShardSet.open(tmp_path)


def test_damage_is_found_when_read_and_names_the_file(tmp_path):
    path = tmp_path / "training_7.hdf5"
    write_shard(path, make_columns(size=500, seq_len=64))
    shards = ShardSet.open(tmp_path)
    with h5py.File(path) as file:
        offset = file["input_ids"].id.get_chunk_info(0).byte_offset
    content = bytearray(path.read_bytes())
    content[offset + 100] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"training_7\.hdf5 is damaged"):
        shards.read(0)


def test_truncated_shards_never_read(tmp_path):
    path = tmp_path / "training_7.hdf5"
    write_shard(path, make_columns(size=50))
    content = path.read_bytes()
    for length in range(0, len(content), 499):
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match=r"training_7\.hdf5"):
            ShardSet.open(tmp_path).read(0)


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([("training_0.hdf5", 4)], r"training_0\.hdf5 holds 3 samples, but manifest\.json says 4 samples"),
        ([("training_0.hdf5", 3), ("training_1.hdf5", 3)], r"training_1\.hdf5 is missing, but .* says 3 samples"),
        ([], r"training_0\.hdf5 holds 3 samples, but manifest\.json does not list it"),
    ],
)
def test_shards_that_the_manifest_does_not_describe(tmp_path, listed, message):
    write_shard(tmp_path / "training_0.hdf5", make_columns())
    make_manifest(*(ManifestShard(name, size, "aa") for name, size in listed)).write(tmp_path)
    with pytest.raises(DataError, match=message):
        ShardSet.open(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"manifest\.json is not JSON"),
        ("[]", r"manifest\.json: field 'format' is None"),
        (json.dumps({"format": 99}), r"field 'format' is 99, but this version of trn_dist reads format 1"),
        (json.dumps({"format": 1}), r"manifest\.json lacks or misnames a field \('shards'\)"),
        (json.dumps({"format": 1, "shards": [], "odd": 1}), r"lacks or misnames a field .*odd"),
    ],
)
def test_bad_manifest(tmp_path, text, message):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=message):
        ShardSet.open(tmp_path)


def test_many_shards_open_without_being_read(tmp_path):
    write_shard(tmp_path / "training_0000.hdf5", make_columns())
    for i in range(1, 64):
        shutil.copy(tmp_path / "training_0000.hdf5", tmp_path / f"training_{i:04}.hdf5")
    assert ShardSet.open(tmp_path).num_samples == 64 * 3
