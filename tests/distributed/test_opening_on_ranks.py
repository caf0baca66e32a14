"""What one rank finds out when a run opens, and tells the others."""

from unittest import mock

from folders_of_files import pair
from harness import on_ranks
from tiny import tiny_config

from titan_dit.config.section import UserError
from titan_dit.data import held_out
from titan_dit.data import listing as class_labels
from titan_dit.opening import open_run
from titan_dit.recovery import kept_keys


def opened(world, folder):
    """Calls on this rank, and what it knows then."""
    config = tiny_config(
        model={"num_classes": 3},
        data={"name": "latents", "path": str(folder / "data")},
        job={"dir": str(folder / "run")},
        training={"global_batch_size": 2},
        validation={"every": 1, "samples": 3},
    )
    # The disk of rank 1 shows another run.
    seen = {"data_order": "feistel" if world.is_first else "sort"}, not world.is_first
    with (
        mock.patch.object(kept_keys, "kept", return_value=seen),
        mock.patch.object(class_labels, "read_label", wraps=class_labels.read_label) as labels,
        mock.patch.object(held_out, "group_sizes", wraps=held_out.group_sizes) as sizes,
    ):
        found = open_run(config, world)
    listing = found.source.listing
    settled = found.config.job, found.config.ema
    known = list(listing.names), listing.labels.tolist(), found.sample_order, settled
    (folder / "data" / "features" / "0.npy").unlink(missing_ok=True)
    world.gather(None)
    try:
        open_run(config, world)
    except UserError as error:
        return known, labels.call_count, sizes.call_count, str(error)


def test_one_rank_lists_the_files_reads_their_labels_and_chooses_for_all(tmp_path):
    _, labels = pair(tmp_path / "data", shape=(1, 8, 8))
    (first, *calls), (other, *others) = on_ranks(2, opened, tmp_path)
    assert first == other
    assert (calls[:2], others[:2]) == ([len(labels), 1], [0, 0])
    names, of_files, epochs, (job, ema) = first
    assert names[:2] == ["features/0.npy", "features/1.npy"]
    assert of_files == labels.tolist()
    assert ema.warmup is False
    assert (job.data_order, epochs.data_order, len(epochs.held_out)) == ("feistel", "feistel", 3)
    # Its errors are told, too.
    assert "labels/0.npy has no file of the same name" in calls[2] == others[2]
