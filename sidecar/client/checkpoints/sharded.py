"""Sharded tensors through torch.distributed.checkpoint, with an index in JSON in place of a pickle.

Its writer and reader (docs.pytorch.org/docs/stable/distributed.checkpoint.html) cut and join the shards for any
number of ranks. Only DTensors go here. Its own metadata file is a pickle, which can run code when it is read.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from cadenza.sidecar.client.checkpoints.files import write_new
from cadenza.sidecar.client.errors import CheckpointError, SaveError

INDEX = "index.json"
SCHEMA = "cadenza.sharded/1"


def save(folder: Path, tensors: Mapping[str, torch.Tensor], group: distributed.ProcessGroup | None) -> None:
    """Write all ranks' shards to an existing folder; a collective call of the group.

    Raises SaveError on every rank when one fails.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its warnings are about its own directory layout
            save_state_dict(dict(tensors), storage_writer=_Writer(folder), process_group=group)
    except CheckpointException as error:
        causes = [f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()]
        raise SaveError(f"{folder}: {'; '.join(causes)}") from error


def load(folder: Path, targets: dict[str, torch.Tensor], group: distributed.ProcessGroup | None) -> None:
    """Read the targets in place, each rank its shards; a collective call of the group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_state_dict(dict(targets), storage_reader=_Reader(folder), process_group=group)


class _Writer(FileSystemWriter):
    """The file writer, with our index."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self._folder = folder

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the index, on the coordinator, when all shards are on the disk."""
        written = {result.index: result.storage_data for one in results for result in one}
        tensors = {
            name: _index_entry(name, tensor, written)
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        text = json.dumps({"schema": SCHEMA, "tensors": tensors}).encode()
        write_new(self._folder / INDEX, lambda sink: sink.write(text))


class _Reader(FileSystemReader):
    """The file reader, with our index."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - as overridden
        """Return the metadata of the index."""
        index = json.loads((self._folder / INDEX).read_bytes())["tensors"]
        places = {}
        for name, tensor in index.items():
            for chunk in tensor["chunks"]:
                place = _StorageInfo(Path(chunk["file"]).name, chunk["start"], chunk["length"])
                places[MetadataIndex(name, chunk["offsets"])] = place
        tensors: dict[str, Any] = {}
        for name, tensor in index.items():
            dtype = getattr(torch, tensor["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise CheckpointError(f"{INDEX} names a dtype {tensor['dtype']!r}")
            chunks = [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in tensor["chunks"]]
            properties = TensorProperties(dtype=dtype)
            tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor["size"]), chunks)
        return Metadata(state_dict_metadata=tensors, storage_data=places)


def _index_entry(name: str, tensor: TensorStorageMetadata, written: Mapping[MetadataIndex, Any]) -> dict[str, Any]:
    """Return one tensor's entry of the index."""
    chunks = []
    for chunk in tensor.chunks:
        place = written[MetadataIndex(name, chunk.offsets)]
        shape = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
        chunks.append({**shape, "file": place.relative_path, "start": place.offset, "length": place.length})
    dtype = str(tensor.properties.dtype).removeprefix("torch.")
    return {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
