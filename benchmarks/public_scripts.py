#!/usr/bin/env python3
"""Public training scripts under moves: each runs alone, and again with two moves at random boundaries.

    benchmarks/public_scripts.py FOLDER [--python PYTHON] [--only NAME] [--seed 1]
    benchmarks/public_scripts.py --random-moves 1000

FOLDER holds clones of the repositories, by their names. The scripts are not part of this repository: what is not there,
or what its Python lacks, is said. Each script runs in a copy of its folder, with a few lines added where a text of it
stands, or unmodified, under `cadenza run`. After each optimizer step the losses and checksums of parameters, buffers,
optimizer state and random numbers are compared (as `cadenza run --rehearse-move` does). Exit code 1 if one differs.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import random_moves

from cadenza.sidecar.client.bootstrap.rehearsal import Rehearsal, Start, compare
from cadenza.sidecar.client.bootstrap.rehearsal_compare import Unrecordable

MOVES = 2
IMPORT = "from cadenza.sidecar import client"


@dataclass(frozen=True)
class Script:
    """A public script: where it is, how it runs, and the lines that make it movable."""

    name: str
    repository: str
    path: str
    arguments: str = ""
    lines: Sequence[tuple[str, str]] = ()
    """Insertions, see ``add``."""
    needs: Sequence[str] = ()
    """Modules."""
    steps: int = 40
    prepare: Callable[[Path], None] | None = None
    absent: str = ""
    """The reason why it cannot run here, even if it is there."""

    @property
    def added(self) -> int:
        """Number of lines that are added."""
        return sum(text.count("\n") for _, text in self.lines)


def add(anchor: str, *lines: str) -> tuple[str, str]:
    """Return an insertion: after a text that ends in a line break, else before it."""
    return anchor, "".join(f"{line}\n" for line in lines)


def write_tokens(folder: Path) -> None:
    """Write nanoGPT's data: random tokens."""
    data = folder / "data" / "random"
    data.mkdir(parents=True)
    draw = random.Random(1)
    for name in ("train.bin", "val.bin"):
        (data / name).write_bytes(struct.pack("<4000H", *(draw.randrange(64) for _ in range(4000))))


def write_digits(folder: Path) -> None:
    """Write files in the form of MNIST's, with random pictures."""
    raw = folder.parent / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    draw = random.Random(1)
    for name, count in (("train", 320), ("t10k", 64)):
        (raw / f"{name}-images-idx3-ubyte").write_bytes(
            struct.pack(">4I", 2051, count, 28, 28) + draw.randbytes(count * 784)
        )
        labels = bytes(draw.randrange(10) for _ in range(count))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, count) + labels)


def write_pictures(folder: Path) -> None:
    """Write small pictures of two classes, as files that need no library (PPM)."""
    draw = random.Random(1)
    for part in ("train", "validation"):
        for kind in ("a", "b"):
            place = folder / "pictures" / part / kind
            place.mkdir(parents=True)
            for number in range(16):
                (place / f"{number}.ppm").write_bytes(b"P6 32 32 255\n" + draw.randbytes(3 * 32 * 32))


def fewer_samples(folder: Path) -> None:
    """Make the imagenet script's dummy data small: an epoch of it has 1.2 million pictures."""
    script = folder / "main.py"
    text = script.read_text()
    script.write_text(
        text.replace("FakeData(1281167, (3, 224", "FakeData(48, (3, 224").replace("FakeData(50000", "FakeData(16")
    )


KEEPER = 'keeper = client.checkpoint("moves", model=model, optimizer=optimizer, '
NANOGPT = (
    "--device=cpu --compile=False --dtype=float32 --dataset=random --eval_iters=2 --eval_interval=10 --n_layer=2 "
    "--n_head=2 --n_embd=32 --block_size=32 --batch_size=4 --gradient_accumulation_steps=2 --dropout=0.1"
)
LOOP, LOOP_END = "t0 = time.time()\nlocal_iter_num = 0", "    iter_num += 1\n    local_iter_num += 1\n"
SCRIPTS = (
    Script(
        "nanoGPT train.py", "karpathy/nanoGPT", "train.py", NANOGPT,
        (
            add("import os\n", IMPORT),
            add(
                LOOP,
                "ahead = {}",
                "client.attach(model, optimizer, scaler)",
                KEEPER + 'scaler=scaler, own={"ahead": ahead})',
                'if keeper.restore(): X, Y, iter_num, best_val_loss = map(ahead.get, ("X", "Y", "iter", "best"))',
            ),
            add(
                LOOP_END,
                "    ahead.update(X=X, Y=Y, iter=iter_num, best=float(best_val_loss))",
                "    keeper.at(iter_num)",
                "    client.boundary()",
            ),
        ),
        needs=("numpy",), prepare=write_tokens,
    ),
    Script(
        "nanoGPT train.py, five lines", "karpathy/nanoGPT", "train.py", NANOGPT,
        (
            add("import os\n", IMPORT),
            add(
                LOOP,
                "client.attach(model, optimizer, scaler)",
                KEEPER + "scaler=scaler)",
                "iter_num = keeper.restore() or 0",
            ),
            add(LOOP_END, "    client.boundary()"),
        ),
        needs=("numpy",), prepare=write_tokens,
    ),
    Script(
        "mnist", "pytorch/examples", "mnist/main.py", "--epochs 6 --batch-size 32",
        (
            add("import argparse\n", IMPORT),
            add(
                "    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)\n",
                "    " + KEEPER + "scheduler=scheduler)",
                "    done = keeper.restore() or 0",
            ),
            add("    for epoch in range(1, args.epochs + 1):\n", "        if epoch <= done: continue"),
            add("        scheduler.step()\n", "        keeper.save(epoch)"),
        ),
        needs=("torchvision",), prepare=write_digits, steps=60,
    ),
    Script(
        "imagenet main.py --dummy", "pytorch/examples", "imagenet/main.py",
        "--dummy --arch resnet18 --batch-size 8 --workers 2 --epochs 6 --print-freq 100 --seed 1",
        (
            add("import argparse\n", IMPORT),
            add(
                "    # Data loading code\n",
                "    " + KEEPER + "scheduler=scheduler)",
                "    args.start_epoch = keeper.restore() or args.start_epoch",
            ),
            add("            }, is_best)\n", "        keeper.save(epoch + 1)"),
        ),
        needs=("torchvision",), prepare=fewer_samples, steps=24,
    ),
    Script(
        "dcgan", "pytorch/examples", "dcgan/main.py",
        "--dataset fake --imageSize 64 --ngf 8 --ndf 8 --batchSize 250 --workers 1 --niter 6 --manualSeed 3",
        (
            add("import argparse\n", IMPORT),
            add(
                "if opt.dry_run:\n    opt.niter = 1\n",
                'keeper = client.checkpoint("moves", model=[netG, netD], optimizer=[optimizerG, optimizerD])',
                "done = keeper.restore() or 0",
            ),
            add("for epoch in range(opt.niter):\n", "    if epoch < done: continue"),
            add(
                "    torch.save(netD.state_dict(), '%s/netD_epoch_%d.pth' % (opt.outf, epoch))\n",
                "    keeper.save(epoch + 1)",
            ),
        ),
        needs=("torchvision",), steps=48,
    ),
    Script(
        "timm train.py", "huggingface/pytorch-image-models", "train.py",
        "--data-dir pictures --dataset torch/image_folder --model resnet18 --num-classes 2 --input-size 3 32 32 -b 8 "
        "--epochs 6 --cooldown-epochs 0 --warmup-epochs 1 --workers 1 --device cpu --opt adamw --lr 0.001",
        (
            add("import argparse\n", IMPORT),
            add(
                "    results = []\n",
                "    " + KEEPER + "scheduler=lr_scheduler)",
                "    start_epoch = keeper.restore() or start_epoch",
            ),
            add("                lr_scheduler.step(epoch_p_1, latest_metric)\n", "            keeper.save(epoch + 1)"),
        ),
        needs=("torchvision",), prepare=write_pictures, steps=24,
    ),
    Script(
        "PPO", "vwxyzjn/cleanrl", "cleanrl/ppo.py", "--no-cuda --num-steps 32 --total-timesteps 3000",
        needs=("gymnasium", "tyro", "tensorboard"),
    ),
    Script(
        "DQN", "vwxyzjn/cleanrl", "cleanrl/dqn.py", "--no-cuda --learning-starts 100 --total-timesteps 1000",
        needs=("gymnasium", "tyro", "tensorboard"),
    ),
    Script(
        "accelerate complete_cv_example.py", "huggingface/accelerate", "examples/complete_cv_example.py",
        absent="it begins with weights that it downloads",
    ),
    Script(
        "FSDP2 example.py", "pytorch/examples", "distributed/FSDP2/example.py", absent="it ends without two GPUs",
    ),
    Script(
        "Trainer run_glue.py", "huggingface/transformers", "examples/pytorch/text-classification/run_glue.py",
        absent="it downloads its data; tests/client/test_integrations_jobs.py moves a Trainer",
    ),
    Script(
        "Lightning image_classifier", "Lightning-AI/pytorch-lightning", "examples/pytorch/basics/autoencoder.py",
        absent="it downloads its data; tests/client/test_integrations_jobs.py moves a Lightning training",
    ),
)  # fmt: skip


@dataclass
class Row:
    """A line of the table."""

    script: Script
    commit: str
    moves: int
    result: str
    steps: str = ""


def with_lines(text: str, lines: Sequence[tuple[str, str]]) -> str:
    """Return a script with lines added; raise ValueError for a text that does not stand in it once."""
    for anchor, added in lines:
        if text.count(anchor) != 1 and not (anchor.startswith("import ") and anchor in text):
            raise ValueError(f"{anchor.strip()!r} stands in it {text.count(anchor)} times: another version?")
        text = text.replace(anchor, anchor + added if anchor.endswith("\n") else added + anchor, 1)
    return text


def lacking(python: str, modules: Sequence[str]) -> str:
    """Return the first module that a Python lacks."""
    for module in modules:
        if subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode:
            return module
    return ""


def play(script: Script, source: Path, work: Path, python: str, draw: random.Random) -> tuple[int, str, str]:
    """Run a script alone and moved; return the number of moves, the result, and the steps of the moves."""
    # 1. A copy of the script's folder, with its lines.
    folder = work / "copy" / "script"
    shutil.copytree(source.parent, folder, ignore=shutil.ignore_patterns(".git"))
    if script.prepare:
        script.prepare(folder)
    place = folder / source.name
    try:
        place.write_text(with_lines(place.read_text(), script.lines))
    except ValueError as error:
        return 0, f"not run: {error}", ""
    paths = [str(source.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = ["env", "-C", str(folder), python, source.name, *script.arguments.split()]
    rehearsal = Rehearsal(command, work, environ)
    # 2. Alone.
    alone = rehearsal.alone(script.steps)
    alone.cut(script.steps)
    if alone.outcome.status not in (None, 0) or not alone.steps:
        return 0, f"not run: its status is {alone.outcome.status}: {last_line(alone)}", ""
    # 3. Two moves, each in the first part of what is left, and the rest.
    starts: list[Start] = []
    made, steps = 0, []
    while not starts or starts[-1].outcome.saved is not None:
        order = draw.randint(1, max(1, (alone.steps - made) // 2)) if len(starts) < MOVES else 0
        left = alone.steps - made + (0 if alone.outcome.status is None else alone.steps)
        starts.append(rehearsal.moved(len(starts), left, order))
        made += starts[-1].steps
        if starts[-1].outcome.saved is not None:
            steps.append(made)
        elif order:
            break
    moves = len(steps)
    if starts[-1].outcome.reasons and not moves:
        return 0, f"refused: {starts[-1].outcome.reasons[0]}", ""
    verdict = compare(alone, starts)
    result = "identical" if verdict.identical else "DIFFERS: " + " | ".join(map(str.strip, verdict.lines))
    if moves < MOVES:
        result += f", and no move {moves + 1}: {'; '.join(starts[-1].outcome.reasons) or 'it ended before'}"
    return moves, result, ", ".join(map(str, steps)) + f" of {alone.steps}"


def last_line(start: Start) -> str:
    """Return the last line of a start's output."""
    return (start.output.read_text(errors="replace").strip().splitlines() or [""])[-1][:200]


def run_one(script: Script, folder: Path, python: str, seed: int, keep: bool) -> Row:  # noqa: FBT001
    """Return a script's line of the table."""
    clone = folder / script.repository.rpartition("/")[2]
    source = clone / script.path
    commit = ""
    if clone.exists():
        # of the clone itself; a folder within another repository has none
        found = subprocess.run(
            ["git", "-C", clone, "log", "-1", "--format=%h"], capture_output=True, text=True, check=False,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder)},
        )  # fmt: skip
        commit = found.stdout.strip()
        if not commit and (clone / "COMMIT").exists():
            commit = (clone / "COMMIT").read_text().strip()[:9]
    if script.absent:
        return Row(script, commit, 0, f"not run: {script.absent}")
    if not source.exists():
        return Row(script, commit, 0, f"not there: {source}")
    if module := lacking(python, script.needs):
        return Row(script, commit, 0, f"not run: {python} has no {module}")
    work = Path(tempfile.mkdtemp(prefix="cadenza-public-"))
    began = time.monotonic()
    try:
        moves, result, steps = play(script, source, work, python, random.Random(seed))
    except Unrecordable as error:
        moves, result, steps = 0, f"cannot be compared: {error}", ""
    print(f"  {script.name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    if keep:
        print(f"  {work}", file=sys.stderr)
    else:
        shutil.rmtree(work)
    return Row(script, commit, moves, result, steps)


def table(rows: Sequence[Row]) -> str:
    """Return the table."""
    head = "| script | repository, commit | lines added | moves | after steps | result |\n|---|---|---|---|---|---|"
    lines = [
        f"| {row.script.name} | {row.script.repository} {row.commit or '-'} | {row.script.added or 'none'} "
        f"| {row.moves} | {row.steps} | {row.result} |"
        for row in rows
    ]
    return "\n".join([head, *lines])


def main() -> int:
    """Print the table; return 1 if a script differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the outputs and records")
    parser.add_argument("--random-moves", type=int, default=0)
    given = parser.parse_args()
    if given.random_moves:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # a disk is not what is measured
            return random_moves.main(Path(folder), given.random_moves, given.seed)
    if given.folder is None:
        parser.error("FOLDER holds the clones; or give --random-moves N")
    chosen = [script for script in SCRIPTS if given.only in script.name]
    rows = [run_one(script, given.folder.absolute(), given.python, given.seed, given.keep) for script in chosen]
    print(table(rows))
    return 1 if any("DIFFERS" in row.result for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
