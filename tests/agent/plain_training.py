"""A training script that knows nothing of Cadenza: ``plain_training.py OUT STEPS END``; its data set is on the GPU.

It writes the moment and the loss of each step, and a digest of all that it has on the GPU after the last one: step
STEPS, or the first one at which the file END is there.
"""

import hashlib
import sys
import time
from pathlib import Path

import torch

out, steps, end = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
device = torch.accelerator.current_accelerator()
torch.set_num_threads(1)
torch.manual_seed(3)
table = torch.arange(65 << 20, dtype=torch.int32, device=device).view(-1, 1024)  # 260 MiB
model = torch.nn.Sequential(torch.nn.Linear(1024, 2560), torch.nn.ReLU(), torch.nn.Linear(2560, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
with out.open("a", buffering=1) as file:
    for _ in range(steps):
        rows, labels = torch.randint(0, len(table), (4,)).to(device), torch.randint(0, 10, (4,)).to(device)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(table[rows] / float(1 << 26)), labels)
        loss.backward()
        optimizer.step()
        print(time.monotonic(), loss.item().hex(), file=file)
        if end.exists():
            break
    digest = hashlib.sha256()
    for tensor in (table, *model.parameters(), *(one["momentum_buffer"] for one in optimizer.state.values())):
        digest.update(tensor.detach().cpu().numpy().tobytes())
    print("digest", digest.hexdigest(), file=file)
