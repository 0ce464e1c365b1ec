"""Checkpoints load on any mesh, and are used only if they are complete; a run survives a full
disk."""

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import subprocess
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    UNTIED,
    calm_run,
    edit,
    lives,
    mesh,
    random_params,
    read_jsonl,
    refused,
    running,
    same_weights,
    saving,
    until,
    without_times,
)
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_array_equal
from safetensors.numpy import load_file

import train
from infra.host import files, processes
from infra.run import checkpoint, log, run, run_dir
from infra.update.state import abstract_state

ONE_FILE = "shards-00000-of-00001.safetensors"


# ---------------------------------------------------------------- shards
def tree_of(params, step):
    """Returns a tree like a trainer's state: parameters beside an integer and a tuple."""
    return {"params": params, "step": jnp.int32(step), "more": (params["norm_D"],)}


def save(tree, directory):
    """Save a checkpoint as the only process, and return its file."""
    checkpoint.save_shards(checkpoint.shards_of(tree), directory, {"run": "1"})
    return directory / ONE_FILE


def test_saved_shards_load_on_other_meshes(tmp_path):
    tree = tree_of(random_params(UNTIED, mesh(1, 8, 1)), 7)
    file = save(tree, tmp_path)
    for on in (mesh(), mesh(1, 8, 1), mesh(2, 2, 2)):
        wanted = tree_of(random_params(UNTIED, on), 0)
        wanted["more"] = (jnp.zeros(UNTIED.D),)
        loaded = checkpoint.load_shards([file], wanted)
        jax.tree.map(assert_array_equal, loaded, tree)
        for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(wanted), strict=True):
            assert (a.sharding, a.dtype) == (b.sharding, b.dtype)


@pytest.mark.parametrize("dims", [(1, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_the_size_of_a_checkpoint_is_known_beforehand(dims):
    cfg = train.parse(["--beta", "0.1", "--dtype", "bfloat16"])
    wanted = abstract_state(cfg, UNTIED, mesh(*dims), train.optimizer)
    state = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), wanted)
    # The state has the parameters, two moments and the reference.
    written = sum(shard.nbytes for shard in checkpoint.shards_of(state).values())
    assert run_dir.checkpoint_bytes(wanted) == written > 12 * UNTIED.n_params


@pytest.mark.parametrize(
    "flags, wanted",
    [
        ("--save_every 1 --keep 2", "3 checkpoints at once, of 0.75 GiB a process, and final need"),
        ("--save_every 1 --keep 1", "2 checkpoints at once"),
        ("--save_every 0 --keep 2", "1 checkpoints at once"),
        ("--save_every 1 --keep 9 --steps 3", "3 checkpoints at once"),
    ],
)
def test_a_disk_that_is_too_small_is_refused_before_weights_load(
    flags, wanted, tmp_path, monkeypatch
):
    """If the disk has no room for the checkpoints and the final model, as may happen on the 100 GB
    of a TPU VM, the run is refused before weights load."""
    monkeypatch.setattr(run_dir, "checkpoint_bytes", lambda state: 3 * 2**28)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**29))
    text = refused("--sft_steps 0 --steps 160 --eval_data none", flags, "--out", tmp_path / "run")
    assert wanted in text and "where 0.50 are free; try --keep 1, --save_every 0" in text, text


@pytest.mark.parametrize(
    "here, steps_left, keep, at_once", [(2, 1, 2, 3), (1, 1, 2, 2), (0, 9, 2, 3), (3, 5, 1, 2)]
)
def test_checkpoints_that_are_here_need_room_beside_the_next_one(
    here, steps_left, keep, at_once, tmp_path, monkeypatch, capsys
):
    """All but `keep` of them are deleted before the next save, and a run needs no more room after a
    stop than at its start. A damaged one, of a later step than the run resumes from, may stay."""
    monkeypatch.setattr(run_dir, "checkpoint_bytes", lambda state: 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**33))
    for step in range(here):
        (tmp_path / f"step_{step:06}").mkdir()
    state = {"params": {"norm_D": np.zeros(1)}}
    run_dir.check_disk(str(tmp_path), state, here, here + steps_left, save_every=1, keep=keep)
    assert f"{at_once} checkpoints at once and final/ take {at_once}.00" in capsys.readouterr().out
    (tmp_path / "step_000099").mkdir()
    run_dir.check_disk(str(tmp_path), state, here, here + steps_left, save_every=1, keep=keep)
    beside = at_once + 1
    assert f"{beside} checkpoints at once and final/ take {beside}.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    "done, total, saves", [(0, 100, 2), (0, 101, 3), (49, 101, 3), (50, 100, 1), (60, 70, 1)]
)
def test_the_checkpoints_of_the_steps_that_are_left_are_counted(
    done, total, saves, tmp_path, monkeypatch, capsys
):
    """A run that a signal stopped after step 49 of 101 saves steps 50, 100 and 101."""
    monkeypatch.setattr(run_dir, "checkpoint_bytes", lambda state: 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**33))
    state = {"params": {"norm_D": np.zeros(1)}}
    run_dir.check_disk(str(tmp_path), state, done, total, save_every=50, keep=9)
    assert f"{saves} checkpoints at once and final/ take {saves}.00" in capsys.readouterr().out


def test_a_run_with_a_bucket_keeps_the_checkpoint_that_it_resumed_from(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(run_dir, "checkpoint_bytes", lambda state: 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**33))
    monkeypatch.chdir(tmp_path)
    state = {"params": {"norm_D": np.zeros(1)}}
    for done, at_once in ((0, 1), (1, 2)):
        run_dir.check_disk("out/gs/bucket/run", state, done, 9, save_every=1, keep=5)
        assert f"{at_once} checkpoints at once and final/ take" in capsys.readouterr().out


def test_the_room_of_checkpoints_that_are_here_counts_as_free(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_dir, "checkpoint_bytes", lambda state: 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 * 2**28))
    monkeypatch.setattr(files, "directory_bytes", lambda path: 2**30)
    (tmp_path / "step_000001").mkdir()
    state = {"params": {"norm_D": np.zeros(1)}}
    run_dir.check_disk(str(tmp_path), state, 1, 2, save_every=1, keep=1)
    assert "disk: 2.25 GiB are free; 2 checkpoints at once" in capsys.readouterr().out


def test_the_final_model_of_adapters_needs_room_for_all_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**33))
    monkeypatch.setattr(run_dir, "checkpoint_bytes", lambda state: 0)
    # The final model is in float32 at most, so 2**29 values take 2 GiB.
    base = {"head_VD": jax.ShapeDtypeStruct((2**19, 2**10), jnp.bfloat16)}
    state = {"params": {"wq_a_LDR": np.zeros(1)}, "base": base}
    run_dir.check_disk(str(tmp_path), state, 0, 1, save_every=1, keep=1)
    assert "1 checkpoints at once and final/ take 2.00" in capsys.readouterr().out


def test_processes_that_share_a_disk_share_its_room(tmp_path, monkeypatch):
    """Here two processes need 1 GiB each. Each sees 1.5 GiB of a disk free."""
    monkeypatch.setattr(run_dir, "all_gather_processes", lambda own: np.stack([own, own]))
    assert run_dir.worst_disk(str(tmp_path), 1.0, 1.5) == (1.0, 1.5)
    # Process 0 writes the claim. If all processes see it, they are on the same disk.
    (tmp_path / "claim.json").touch()
    assert run_dir.worst_disk(str(tmp_path), 1.0, 1.5) == (2.0, 1.5)


def test_a_file_appears_complete_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), files.atomic_file(path) as f:
        f.write(b"half of")
        f.flush()
        # A kill at this point would leave the old file.
        assert path.read_bytes() == b"old"
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    with files.atomic_file(path) as f:
        f.write(b"new")
    assert path.read_bytes() == b"new"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_shard_that_is_missing_is_named(tmp_path):
    tree = tree_of(random_params(UNTIED, mesh(1, 8, 1)), 7)
    file = save(tree, tmp_path)
    shards = [key for key in load_file(file) if key.startswith("params/embed_VD")]
    edit(file, {shards[3]: None})
    with pytest.raises(files.CheckpointError, match="params/embed_VD"):
        checkpoint.load_shards([file], tree)


def test_an_array_of_another_shape_is_refused(tmp_path):
    """A run that resumes with a smaller --lora would otherwise train a part of each adapter."""
    on = NamedSharding(mesh(1, 8, 1), P("fsdp"))
    tree = {"a": jax.device_put(np.arange(48, dtype=np.float32).reshape(8, 6), on)}
    file = save(tree, tmp_path)
    for shape, words in (
        ((8, 5), "a does not have the shape (8, 5), because a piece of it ends at (1, 6)"),
        ((8, 7), "only 6 of the 7 numbers of a that this process needs; a flag such as --lora"),
        ((8,), "a does not have the shape (8,)"),
    ):
        wanted = {"a": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on)}
        with pytest.raises(files.CheckpointError) as error:
            checkpoint.load_shards([file], wanted)
        assert words in str(error.value), error.value


def save_five_steps(saver):
    """Returns (the newest complete step, the steps on the disk) after each of five saves."""
    saved = []
    for step in range(1, 6):
        saver.remember(step, {"params": {"norm_D": jnp.ones(4)}}, 0)
        saver.begin()
        saver.finish()
        saved.append((saver.newest, checkpoint.saved_steps(saver.out)))
    return saved


def test_the_newest_checkpoints_stay_and_a_full_disk_does_not_end_a_run(
    tmp_path, monkeypatch, capsys
):
    save_shards = checkpoint.save_shards

    def full_in_step_3(shards, directory, about):
        if directory.endswith("step_000003"):
            # Another process has written its part.
            os.makedirs(directory)
            raise OSError(28, "No space left on device")
        save_shards(shards, directory, about)

    monkeypatch.setattr(checkpoint, "save_shards", full_in_step_3)
    saver = checkpoint.Saver(str(tmp_path), keep=2, newest=0)
    saved = save_five_steps(saver)
    assert saved == [(1, [1]), (2, [1, 2]), (2, [1, 2, 3]), (4, [2, 4]), (5, [4, 5])]
    assert "step 3 cannot be saved" in capsys.readouterr().err


@pytest.mark.parametrize("keep", [1, 2])
def test_a_stop_and_a_resume_need_no_more_room_than_a_run(keep, tmp_path, monkeypatch):
    """There are at most `keep` + 1 checkpoints on the disk, as the check of the disk promises: also
    in the save at a stop, and in the first save of the run that resumes."""
    save_shards = checkpoint.save_shards
    most = []

    def save_and_count(*arguments):
        save_shards(*arguments)
        most.append(len(checkpoint.saved_steps(str(tmp_path))))

    monkeypatch.setattr(checkpoint, "save_shards", save_and_count)
    step = 0
    # Some launches are stopped before their first regular save.
    for saves in (4, 3, 0, 0, 0, 2):
        saver = checkpoint.Saver(str(tmp_path), keep, step)
        for _ in range(saves):
            step += 1
            saver.remember(step, {"params": {"norm_D": jnp.ones(4)}}, 0)
            saver.begin()
        step += 1
        saver.remember(step, {"params": {"norm_D": jnp.ones(4)}}, 0)
        assert saver.save_together().startswith(f"step {step} is saved")
    assert len(most) == step == 15 and max(most) == keep + 1


def test_checkpoints_that_failed_do_not_fill_the_disk(tmp_path, monkeypatch):
    """While a bucket cannot be reached, only the last checkpoint stays on this disk. The complete
    one is in the bucket."""
    monkeypatch.setattr(checkpoint.bucket, "bucket_of", lambda out: "gs://bucket/run")
    monkeypatch.setattr(checkpoint.Saver, "thin_bucket", lambda *_: None)
    send = mock.Mock(side_effect=[None, OSError("503"), OSError("503"), OSError("503"), None])
    monkeypatch.setattr(checkpoint.Saver, "send", send)
    saver = checkpoint.Saver(str(tmp_path), keep=2, newest=0)
    here = [steps for _, steps in save_five_steps(saver)]
    assert here == [[], [2], [3], [4], []]


def test_a_state_that_an_update_has_taken_is_not_saved(tmp_path):
    """An update donates the arrays of its state, so that they are gone if it fails."""
    array = jnp.ones(4)
    saver = checkpoint.Saver(str(tmp_path), keep=2, newest=0)
    saver.remember(8, {"params": {"norm_D": array}}, 0)
    array.delete()
    assert saver.save_before_exit() == "nothing is saved yet"
    assert checkpoint.saved_steps(str(tmp_path)) == []


def test_a_run_that_ends_waits_until_all_processes_have_saved(tmp_path, monkeypatch):
    saver = checkpoint.Saver(str(tmp_path), keep=2, newest=0)
    saver.remember(8, {"params": {"norm_D": jnp.ones(4)}}, 0)
    monkeypatch.setattr(checkpoint, "all_gather_processes", lambda own: np.array([own, own - 1]))
    assert saver.save_together().startswith("step 7 is saved")
    assert checkpoint.saved_steps(str(tmp_path)) == [8]


def test_the_part_of_one_process_is_not_called_a_saved_step(tmp_path):
    """After a fault, a process saves on its own, since the others may be gone."""
    saver = checkpoint.Saver(str(tmp_path), keep=2, newest=0)
    state = {"params": {"norm_D": jnp.ones(4)}}
    part = "of step {}, only this process's part is known to be saved"
    with mock.patch.object(jax, "process_count", lambda: 2):
        saver.remember(4, state, 0)
        assert saver.save_before_exit() == f"nothing is saved yet; {part.format(4)}"
        # All processes have written step 4, as `finish` learns.
        saver.newest = saver.complete = 4
        saver.remember(5, state, 0)
        said = saver.save_before_exit()
    assert said == f"step 4 is saved; give the same command again to resume; {part.format(5)}"
    # A process that is alone writes all of a checkpoint.
    saver.remember(6, state, 0)
    assert saver.save_before_exit() == "step 6 is saved; give the same command again to resume"


def test_arrays_laid_out_by_columns_are_saved_by_rows(tmp_path):
    # A TPU may lay out an array by columns.
    by_columns = Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[0]))
    columns = jax.device_put(np.arange(6.0, dtype=np.float32).reshape(2, 3), by_columns)
    assert np.asarray(columns).strides == (4, 8)
    file = save({"a": columns}, tmp_path)
    assert_array_equal(checkpoint.load_shards([file], {"a": jnp.zeros((2, 3))})["a"], columns)


# ---------------------------------------------------------------- damage
DAMAGED = "shards-00002-of-00004.safetensors"


def write_checkpoint(out, step, parts=range(4), run="7", complete="0"):
    """Write a checkpoint as four processes do, or only the files of some of them. complete: the
    newest complete checkpoint at that time; None as in files of older commits, which lack it."""
    shards = checkpoint.shards_of({"a": jnp.arange(999.0), "n": jnp.int32(3)})
    for i in parts:
        with mock.patch.multiple(jax, process_index=lambda i=i: i, process_count=lambda: 4):
            about = {"run": run} | ({"complete": complete} if complete else {})
            checkpoint.save_shards(shards, out / f"step_{step:06}", about)


def contents(out):
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def newest(out, capsys):
    """Returns (the step to resume after, the warnings about other checkpoints). Checks that no file
    is changed or deleted."""
    before = contents(out)
    step, paths, _ = run_dir.newest_checkpoint(str(out), "auto")
    assert contents(out) == before
    assert all(f"step_{step:06}" in path for path in paths)
    return step, capsys.readouterr().err


@pytest.fixture
def two_checkpoints(tmp_path):
    """Returns the directory of a run on four processes with the checkpoints of steps 1 and 2."""
    write_checkpoint(tmp_path, 1)
    write_checkpoint(tmp_path, 2)
    return tmp_path


def damages(good):
    """Returns {what is wrong: the damaged bytes of the file, or None for no file}."""
    rng = np.random.default_rng(0)
    # Flip a bit in each byte of the header's length and beginning, and in some bytes anywhere.
    flipped = [*range(16), *rng.integers(0, len(good), 60).tolist()]
    cases = {}
    for i in flipped:
        bit = 1 << int(rng.integers(8))
        cases[f"byte {i}"] = good[:i] + bytes([good[i] ^ bit]) + good[i + 1 :]
    for n in (0, 5, 100, len(good) - 1):
        cases[f"truncated to {n} bytes"] = good[:n]
    cases["longer"] = good + b"x"
    for key in (b"crc32", b"run"):
        cases[f"the key {key}"] = good.replace(key, key[::-1], 1)
    cases["lost"] = None
    return cases


def test_damaged_checkpoints_are_named_and_not_used(two_checkpoints, capsys, record_property):
    """If a bit is flipped, or a file is truncated, too long or lost, the run says which checkpoint
    cannot be used and why, and resumes from the older one."""
    assert newest(two_checkpoints, capsys) == (2, "")
    victim = two_checkpoints / "step_000002" / DAMAGED
    good = victim.read_bytes()
    cases = damages(good)
    for what, damaged in cases.items():
        edit(victim, damaged)
        step, said = newest(two_checkpoints, capsys)
        assert step == 1, (what, said)
        assert said.count("step 2 cannot be used") == 1 and "step_000002" in said, (what, said)
        cause = "has 3 of the files of 4" if damaged is None else DAMAGED
        assert cause in said, (what, said)
        victim.write_bytes(good)
    assert newest(two_checkpoints, capsys) == (2, "")
    record_property("damages", len(cases))


def test_a_checkpoint_with_a_file_of_another_run_is_not_used(two_checkpoints, capsys):
    write_checkpoint(two_checkpoints, 2, parts=[2], run="8")
    assert newest(two_checkpoints, capsys)[0] == 1
    # The checkpoint counts again once all its files are of one run.
    write_checkpoint(two_checkpoints, 2, run="9")
    assert newest(two_checkpoints, capsys) == (2, "")


def test_an_empty_checkpoint_is_not_used(two_checkpoints, capsys):
    for path in (two_checkpoints / "step_000002").iterdir():
        path.unlink()
    step, said = newest(two_checkpoints, capsys)
    assert step == 1 and "step_000002 has no complete file" in said, said


def test_a_run_that_has_more_steps_than_it_was_given_is_refused(two_checkpoints, capsys):
    (two_checkpoints / "config.json").write_text('{"config": {}}')
    with pytest.raises(SystemExit) as end:
        run_dir.open_run(str(two_checkpoints), 1, {"profile": 0}, "force")
    said = capsys.readouterr().err
    assert end.value.code == 2 and "done 2 steps, and sft_steps + steps = 1" in said, said


def test_a_step_to_trace_that_is_done_is_named(two_checkpoints, capsys):
    (two_checkpoints / "config.json").write_text('{"config": {}}')
    # 0 is the default: no step is traced.
    for profile, is_named in {0: False, 1: True, 2: True, 3: False}.items():
        run_dir.open_run(str(two_checkpoints), 9, {"profile": profile}, "force")
        text = f"step {profile} is not traced: the run resumes after step 2\n"
        assert (text in capsys.readouterr().out) == is_named, profile


@pytest.mark.parametrize(
    "old, new, said",
    [
        ({"optimizer": "lion"}, {"optimizer": "adamw"}, "optimizer was 'lion', is now 'adamw'"),
        ({"lora": 4}, {"lora": 0}, "lora was 4, is now 0"),
        ({"beta": 0.0}, {"beta": 0.1}, "beta was 0.0, is now 0.1"),
        ({"beta": 0.1}, {"beta": 0.0}, ""),
        ({"optimizer": "adamw"}, {"optimizer": "lion"}, ""),
        ({"optimizer": "lion"}, {"optimizer": "sgd"}, ""),
        ({"lr": 1.0}, {"lr": 2.0}, ""),
    ],
)
def test_a_checkpoint_without_the_state_that_flags_need_is_refused(
    old, new, said, two_checkpoints, capsys
):
    (two_checkpoints / "config.json").write_text(json.dumps({"config": old}))
    if said:
        with pytest.raises(SystemExit) as end:
            run_dir.open_run(str(two_checkpoints), 9, {"profile": 0} | new, "force")
        assert end.value.code == 2
        assert f"cannot be continued: {said}, and its checkpoints" in capsys.readouterr().err
    else:
        step, *_ = run_dir.open_run(str(two_checkpoints), 9, {"profile": 0} | new, "force")
        assert step == 2


def test_all_code_that_a_run_executes_counts(tmp_path, monkeypatch):
    paths = [tmp_path / name for name in ("train.py", "model.py", "kernel.py", "infra/run/log.py")]
    paths[-1].parent.mkdir(parents=True)
    for path in paths:
        path.write_text("a")
    monkeypatch.setattr(processes, "ROOT", str(tmp_path))
    # Without the cache, which holds the hash of this checkout.
    code_hash = processes.code_hash.__wrapped__
    hashes = [code_hash()]
    for path in paths:
        path.write_text("b")
        hashes.append(code_hash())
    assert len(set(hashes)) == 5


def test_a_resume_warns_if_the_code_has_changed(tmp_path, capsys, monkeypatch):
    data = {"questions": 3, "crc32": 7, "held_out": 0, "held_out_crc32": 0}
    run_dir.write_config(str(tmp_path), {}, data)
    same, now = run.code_hash(), run.commit()
    changed = f"Python files have changed since, at the same commit {now}\n"
    for code, commit, step, said in (
        (same, now, 2, ""),
        ("f00", now, 2, changed),
        ("f00", "beef", 2, f"commit {now} before, beef now\n"),
        ("f00", "beef", 0, ""),
    ):
        monkeypatch.setattr(run, "code_hash", lambda code=code: code)
        monkeypatch.setattr(run, "commit", lambda commit=commit: commit)
        run.Run.note_data(mock.Mock(out=str(tmp_path), step=step), data)
        wanted = said and f"train.py: {tmp_path} resumes with other code: {said}"
        assert capsys.readouterr().err == wanted


def test_new_flags_are_written_only_once_the_checkpoint_has_loaded(two_checkpoints, monkeypatch):
    """After `--resume force` with another --model, whose arrays the checkpoint does not have, the
    old command still resumes the run."""
    flags = {"model": "old", "resume": "auto", "profile": 0}
    files.write_json(str(two_checkpoints / "config.json"), {"config": flags})
    cfg = SimpleNamespace(out=str(two_checkpoints), sft_steps=0, steps=9, resume="force")
    monkeypatch.setattr(dataclasses, "asdict", lambda cfg: flags | {"model": "new"})
    monkeypatch.setattr(run_dir, "keep_compiled", lambda out: None)
    resumed = run.Run(cfg)
    resumed.data = {}
    resumed.saver = mock.Mock()
    wanted = {"other": jax.device_put(jnp.zeros(9), NamedSharding(mesh(), P()))}
    monkeypatch.setattr(train, "abstract_state", lambda *_: wanted)
    setup = SimpleNamespace(model_cfg=None, mesh=None)
    with pytest.raises(files.CheckpointError, match="other that this process needs"):
        train.first_state(cfg, setup, resumed)
    path = str(two_checkpoints / "config.json")
    assert files.read_json(path)["config"]["model"] == "old"
    resumed.begin({})
    assert files.read_json(path)["config"]["model"] == "new"


HELD_OUT = {"held_out": 2, "held_out_crc32": 9}


def test_a_resume_warns_if_the_questions_have_changed(tmp_path, capsys):
    before = {"questions": 3, "crc32": 7} | HELD_OUT
    run_dir.write_config(str(tmp_path), {}, before)
    training = "training prompts or answers have changed: 3 questions before, 3 now\n"
    held_out = "held-out questions, and so its evaluations, differ: 2 questions before, 1 now\n"
    for step, data, what in (
        (2, before, ""),
        (2, before | {"crc32": 8}, training),
        (2, before | {"held_out": 1, "held_out_crc32": 7}, held_out),
        (0, before | {"questions": 4}, ""),
    ):
        run.Run.note_data(mock.Mock(out=str(tmp_path), step=step), data)
        wanted = what and f"train.py: {tmp_path} resumes, but its {what}"
        assert capsys.readouterr().err == wanted


def test_a_resume_of_an_older_version_does_not_warn_of_held_out_questions(tmp_path, capsys):
    before = {"questions": 3, "crc32": 7}
    run_dir.write_config(str(tmp_path), {}, before)
    run.Run.note_data(mock.Mock(out=str(tmp_path), step=2), before | HELD_OUT)
    assert capsys.readouterr().err == ""


def test_a_lost_file_of_another_number_of_processes_ends_the_run(two_checkpoints, capsys):
    """If checkpoints of another number of processes lack a file, the run ends: starting over could
    overwrite what another host may still have."""
    for step in (1, 2):
        (two_checkpoints / f"step_{step:06}" / DAMAGED).unlink()
    assert "was not saved by 1 processes" in refusal(two_checkpoints, capsys)


def refusal(out, capsys):
    """Returns the message that no checkpoint can be used. Checks that no file is changed or
    deleted."""
    before = contents(out)
    with pytest.raises(SystemExit) as end:
        run_dir.newest_checkpoint(str(out), "auto")
    assert end.value.code == 2
    assert contents(out) == before
    last = capsys.readouterr().err.splitlines()[-1]
    assert "--resume force" in last, last
    return last


def test_what_a_kill_in_the_first_save_leaves_is_not_used(tmp_path, capsys):
    """A checkpoint without files is ignored, and so are files whose names are not final, from any
    number of processes."""
    first = tmp_path / "step_000002"
    first.mkdir()
    assert newest(tmp_path, capsys)[0] == 0
    leftovers = [
        "shards-00000-of-00001.safetensors.0.tmp",
        "shards-00003-of-00004.safetensors.3.tmp",
    ]
    leftovers += [
        "shards-00000-of-00001.safetensors_.gstmp",
        "shards-x-of-y.safetensors",
        "._shards",
    ]
    for name in leftovers:
        (first / name).write_bytes(b"half of")
        assert newest(tmp_path, capsys)[0] == 0, name
    (tmp_path / "step_000004").write_text("a file")
    assert newest(tmp_path, capsys)[0] == 0


@contextlib.contextmanager
def process(index, other_has):
    """Inside, this process is one of four.

    other_has(value that this process gathers) -> value that another process gathers.
    """

    def with_other(value):
        return np.stack([value, other_has(np.asarray(value))])

    with (
        mock.patch.multiple(jax, process_index=lambda: index, process_count=lambda: 4),
        mock.patch.object(run_dir, "all_gather_processes", with_other),
    ):
        yield


def test_files_of_the_first_save_of_some_processes_are_not_used(tmp_path, capsys):
    """If two of four processes that share a disk were killed before they wrote their parts of the
    first checkpoint, it is ignored."""
    write_checkpoint(tmp_path, 2, parts=[0, 3])
    with process(1, other_has=np.copy):
        assert newest(tmp_path, capsys)[0] == 0


@pytest.mark.parametrize("backend", ["gpu", "cpu"])
def test_processes_on_gpus_keep_programs_only_on_a_disk_they_share(backend, tmp_path, monkeypatch):
    """On GPUs, the processes that compile a program would wait for one that finds it in a cache."""
    (tmp_path / "claim.json").write_text("{}")
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(run_dir.compilation_cache, "reset_cache", mock.Mock())
    # The tests share a cache, but a run with a chosen cache needs none of its own.
    chosen = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with process(1, other_has=np.zeros_like):
            run_dir.keep_compiled(str(tmp_path))
        is_kept = bool(jax.config.jax_compilation_cache_dir)
        assert is_kept == (backend == "cpu")
        with process(1, other_has=np.copy):
            run_dir.keep_compiled(str(tmp_path))
        assert jax.config.jax_compilation_cache_dir == f"{tmp_path}/compiled"
    finally:
        jax.config.update("jax_compilation_cache_dir", chosen)


def test_checkpoints_that_are_all_damaged_end_the_run(two_checkpoints, capsys):
    for step in (1, 2):
        victim = two_checkpoints / f"step_{step:06}" / DAMAGED
        victim.write_bytes(victim.read_bytes()[:-1])
    assert DAMAGED in refusal(two_checkpoints, capsys)


def test_a_complete_checkpoint_that_other_processes_have_lost_ends_the_run(tmp_path, capsys):
    write_checkpoint(tmp_path, 2, parts=[0], complete="1")
    with process(0, other_has=np.zeros_like):
        said = refusal(tmp_path, capsys)
    assert "process 0 has its part of steps [2], and others have lost theirs" in said


def test_parts_of_two_checkpoints_that_other_processes_lack_end_the_run(tmp_path, capsys):
    """In files of older commits, two checkpoints of one launch tell that the first was complete."""
    write_checkpoint(tmp_path, 1, parts=[0], complete=None)
    write_checkpoint(tmp_path, 2, parts=[0], complete=None)
    with process(0, other_has=np.zeros_like):
        assert "process 0 has its part of steps [2, 1]" in refusal(tmp_path, capsys)


def test_launches_that_were_each_killed_in_their_first_save_are_no_obstacle(tmp_path, capsys):
    """A spot VM may be preempted twice before any checkpoint is complete."""
    for step in (7, 9):
        # Each launch has a number of its own.
        write_checkpoint(tmp_path, step, parts=[0], run=str(step))
    with process(0, other_has=np.zeros_like):
        assert newest(tmp_path, capsys)[0] == 0


def test_a_file_names_the_newest_checkpoint_that_was_complete(tmp_path):
    saver = checkpoint.Saver(str(tmp_path), keep=9, newest=0)
    save_five_steps(saver)
    saver.remember(6, {"params": {"norm_D": jnp.ones(4)}}, 0)
    saver.save_before_exit()
    files_there = [tmp_path / f"step_{step:06}" / ONE_FILE for step in range(1, 7)]
    named = [checkpoint.read_about(path)["complete"] for path in files_there]
    assert named == ["0", "1", "2", "3", "4", "5"]


def test_resume_force_starts_over_beside_the_old_files(two_checkpoints):
    for name in ("metrics.jsonl", "samples.jsonl", "config.json", "notes.txt"):
        (two_checkpoints / name).write_text(name)
    for step in (1, 2):
        (two_checkpoints / f"step_{step:06}" / DAMAGED).write_bytes(b"")
    before = contents(two_checkpoints)
    found = run_dir.newest_checkpoint(str(two_checkpoints), "force")
    assert found == (0, [], {})
    (old,) = two_checkpoints.glob("old-*")
    kept = {"config.json", "notes.txt"}
    now = {path.relative_to(two_checkpoints).as_posix(): text for path, text in before.items()}
    moved = {name if name in kept else f"{old.name}/{name}": text for name, text in now.items()}
    assert contents(two_checkpoints) == {two_checkpoints / name: moved[name] for name in moved}


def opened(out, resume="auto"):
    """Returns the result of run_dir.open_run for a directory, with the default flags."""
    cfg = train.parse(["--out", str(out)])
    flags = dataclasses.asdict(cfg)
    return run_dir.open_run(str(out), cfg.sft_steps + cfg.steps, flags, resume)


def test_half_of_the_first_file_is_not_in_the_way(tmp_path):
    """Half-written files of a killed process do not stop the next run."""
    for name in ("config.json.0.tmp", "claim.json.tmp", "claim.json", "rewards.log"):
        (tmp_path / name).write_text("{")
    assert opened(tmp_path) == (0, [], 0)


def test_a_final_model_without_its_checkpoints_is_left_alone(tmp_path, capsys):
    """A run with a final model but no checkpoints, as when step_* were deleted to make room, is
    refused: it would start over, and overwrite the model."""
    flags = dataclasses.asdict(train.parse(["--out", str(tmp_path)]))
    files.write_json(str(tmp_path / "config.json"), {"config": flags})
    for name in ("final/model.safetensors", "profile/trace", "metrics.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as end:
        opened(tmp_path)
    assert end.value.code == 2 and contents(tmp_path) == before
    assert "has a final model, and no checkpoint" in capsys.readouterr().err
    assert opened(tmp_path, "force") == (0, [], 0)
    (old,) = tmp_path.glob("old-*")
    assert sorted(path.name for path in old.iterdir()) == ["final", "metrics.jsonl", "profile"]


def test_a_final_model_of_fewer_steps_is_not_the_end(tmp_path):
    """A run that was given more steps, and was killed while it wrote the final model, is not
    finished: it opens at its last step, to write that model."""
    cfg = train.parse(["--out", str(tmp_path)])
    total = cfg.sft_steps + cfg.steps
    files.write_json(str(tmp_path / "config.json"), {"config": dataclasses.asdict(cfg)})
    save({"a": jnp.arange(9.0)}, tmp_path / f"step_{total:06}")
    (tmp_path / "final").mkdir()
    files.write_json(str(tmp_path / "final/podgrpo.json"), {"step": total - 1})
    done, _, _ = opened(tmp_path)
    assert done == total
    files.write_json(str(tmp_path / "final/podgrpo.json"), {"step": total})
    with pytest.raises(SystemExit) as end:
        opened(tmp_path)
    assert end.value.code == 0


# ---------------------------------------------------------------- a full disk
@contextlib.contextmanager
def small_disk(directory):
    """Mount a disk of 50 MB in the directory."""
    command = ["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", str(directory)]
    try:
        refused = subprocess.run(command, capture_output=True).returncode
    except FileNotFoundError:
        refused = True
    if refused:
        pytest.skip("needs the right to mount a disk")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)])


def fill(path):
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as f:
        while f.write(bytes(10_000)):
            pass


def test_a_line_without_room_is_printed_and_counted(tmp_path, capsys):
    """A line that does not fit on the disk leaves nothing in the file. It is printed and counted
    instead, and the file takes the next line that fits."""
    lines = log.JsonLines(str(tmp_path / "lines.jsonl"))
    lines.append({"step": 1})
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Like a disk that has room for half a line.
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, most[1]))
    try:
        lines.append({"step": 2}, {"step": 3, "loss": float("nan")})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    printed = capsys.readouterr().err
    assert "lines.jsonl cannot be written" in printed and "lines lost: 2" in printed, printed
    assert '{"step": 2}\n{"step": 3, "loss": null}\n' in printed, printed
    lines.append({"step": 4})
    assert read_jsonl(tmp_path / "lines.jsonl") == [{"step": 1}, {"step": 4}]


def rows_of(text):
    """Returns the rows in a printed text that were meant for a file."""
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"step": ')]


def in_order(rows):
    """Sort rows of metrics by step, with the row of a step before its evaluation."""
    return without_times(sorted(rows, key=lambda row: (row["step"], "eval/solved" in row)))


@pytest.mark.slow
def test_a_run_goes_on_when_the_disk_is_full(tmp_path, tmp_path_factory, record_property):
    """A run whose disk fills up after the first checkpoint, and later has room again, ends with the
    same weights as the undisturbed run. Each line is once in its file or on stderr."""
    calm = calm_run(tmp_path_factory)
    output = tmp_path / "log"
    (tmp_path / "disk").mkdir()

    def said(text):
        return output.read_text(errors="replace").count(text)

    with (
        small_disk(tmp_path / "disk") as disk,
        running(disk / "run", lives(tmp_path_factory, 9), log=output) as runs,
    ):
        out = disk / "run"

        def first_is_saved():
            return (out / "step_000002").exists() and not saving(out)

        assert until(first_is_saved, runs), output.read_text()
        # Some lines may still fit in the last block of their file.
        fill(disk / "filler")
        alive = until(lambda: said("cannot be saved") and said("metrics.jsonl cannot be"), runs)
        kept, _, _ = run_dir.newest_checkpoint(str(out), "auto")
        assert alive and kept and said("No space left"), output.read_text()
        (disk / "filler").unlink()
        assert runs[0].wait(300) == 0, output.read_text()
        same_weights(out, calm)
        printed = rows_of(output.read_text())
        metrics = [row for row in printed if "question" not in row]
        assert metrics, "no line was lost"
        assert said(f"metrics.jsonl lacks {len(metrics)} lines") == 1
        written = read_jsonl(out / "metrics.jsonl")
        assert in_order(written + metrics) == in_order(read_jsonl(calm / "metrics.jsonl"))
        # Only an evaluation's answers name their set.
        evals = [row for row in printed if "set" in row]
        samples = [row for row in printed if "question" in row and "set" not in row]
        for name, rows in (("evals.jsonl", evals), ("samples.jsonl", samples)):
            assert len(rows + read_jsonl(out / name)) == len(read_jsonl(calm / name)), name
    record_property("complete all along", f"step {kept}; {said('cannot be saved')} not saved")
    record_property("metrics rows on stderr", len(metrics))


def test_checkpoints_of_two_launches_are_not_mixed(tmp_path, capsys):
    """Each process has a part of step 2 on its own disk, but the parts are from two launches."""

    def other_launch(value):
        return value + 1 if value.size == 1 and value > 1 else value.copy()

    write_checkpoint(tmp_path, 2, parts=[0], complete="1")
    with process(0, other_has=other_launch):
        assert "process 0 has its part of steps [2]" in refusal(tmp_path, capsys)
    with process(0, other_has=np.copy):
        assert run_dir.newest_checkpoint(str(tmp_path), "auto")[0] == 2


@pytest.mark.parametrize("newer", ["4 processes", "1 process"])
def test_the_newer_of_two_complete_launches_counts(newer, tmp_path):
    """The launches had different numbers of processes, so neither replaced the other's files."""
    is_one = newer == "1 process"
    write_checkpoint(tmp_path, 2, run="7" if is_one else "9")
    shards = checkpoint.shards_of({"a": jnp.arange(9.0)})
    checkpoint.save_shards(shards, tmp_path / "step_000002", {"run": "8"})
    paths, about = checkpoint.complete_checkpoint(str(tmp_path / "step_000002"))
    assert about["run"] == (8 if is_one else 9) and len(paths) == (1 if is_one else 4)


def test_a_resume_drops_the_answers_of_an_evaluation_without_a_row(tmp_path):
    rows = {
        "metrics": [{"step": 1}, {"step": 1, "eval/solved": 0.5}, {"step": 2}, {"step": 3}],
        "samples": [{"step": 1}, {"step": 2}, {"step": 3}],
        "evals": [{"step": 1, "answer": "a"}, {"step": 2, "answer": "b"}],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    run_dir.truncate_to(str(tmp_path), 2)
    left = {name: read_jsonl(tmp_path / f"{name}.jsonl") for name in rows}
    assert left == {
        "metrics": rows["metrics"][:3],
        "samples": rows["samples"][:2],
        "evals": rows["evals"][:1],
    }
    run_dir.truncate_to(str(tmp_path), 0)
    assert not any(read_jsonl(tmp_path / f"{name}.jsonl") for name in rows)
