"""Small stand-ins for the data and weights that public scripts download, and for their sizes."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from pathlib import Path


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
    replace(
        folder / "main.py",
        ("FakeData(1281167, (3, 224", "FakeData(48, (3, 224"),
        ("FakeData(50000", "FakeData(16"),
    )


GLUE_CONFIGURATION = """---
configs:
- config_name: mrpc
  data_files:
  - split: train
    path: train.csv
  - split: validation
    path: validation.csv
---
"""
METRIC = """import datasets
import evaluate

class Metric(evaluate.Metric):
    def _info(self):
        integers = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="", features=datasets.Features(integers)
        )

    def _compute(self, predictions, references):
        right = sum(int(one == other) for one, other in zip(predictions, references)) / len(references)
        return {key: right for key in KEYS}
"""
WEIGHTS = """import sys
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast
torch.manual_seed(1)
small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
BertTokenizerFast("vocab.txt").save_pretrained("bert-base-cased")
BertForSequenceClassification(BertConfig(vocab_size=65, **small)).save_pretrained("bert-base-cased")
"""


def write_glue(folder: Path) -> None:
    """Write pairs of random words, a small BERT, and metrics, where the scripts look before they download them."""
    draw = random.Random(1)
    words = [f"w{number}" for number in range(60)]
    data = folder / "nyu-mll" / "glue"
    data.mkdir(parents=True)
    for part, count in (("train", 96), ("validation", 16)):
        rows = [
            (" ".join(draw.choices(words, k=6)), " ".join(draw.choices(words, k=6)), draw.randrange(2), row)
            for row in range(count)
        ]
        lines = ["sentence1,sentence2,label,idx", *(",".join(map(str, row)) for row in rows)]
        (data / f"{part}.csv").write_text("\n".join(lines) + "\n")
    (data / "README.md").write_text(GLUE_CONFIGURATION)
    for name, keys in (("glue", ("accuracy", "f1")), ("accuracy", ("accuracy",))):
        (folder / name).mkdir()
        (folder / name / f"{name}.py").write_text(METRIC.replace("KEYS", repr(keys)))
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    subprocess.run([sys.executable, "-c", WEIGHTS], cwd=folder, check=True, capture_output=True)


def write_words(folder: Path) -> None:
    """Write a text of random words, and make Lightning's language model smaller: its evaluations take 4,000 samples."""
    draw = random.Random(1)
    (folder / "data").mkdir()
    lines = (" ".join(f"w{draw.randrange(40)}" for _ in range(34)) for _ in range(150))
    (folder / "data" / "wikitext-2.txt").write_text("\n".join(lines))
    replace(
        folder / "transformer.py", ("[n - 4000, 2000, 2000]", "[n - 40, 20, 20]"), ("max_epochs=20", "max_epochs=4")
    )


def on_two_cpus(folder: Path) -> None:
    """Let the FSDP2 example run without GPUs, and initialize all of its parameters: some of them are left as found."""
    replace(
        folder / "example.py",
        ("if not verify_min_gpu_count(min_gpus=_min_gpu_count):", "if False:"),
        ("backend=backend, device_id=device", "backend=backend"),
        (
            "        model.reset_parameters()\n",
            (
                "        for one in model.modules():\n"
                "            if hasattr(one, 'reset_parameters'): one.reset_parameters()\n"
            ),
        ),
    )


def replace(script: Path, *changes: tuple[str, str]) -> None:
    """Change texts in a script; one that does not stand in it is left, because the lines to add tell of it."""
    text = script.read_text()
    for old, new in changes:
        text = text.replace(old, new)
    script.write_text(text)
