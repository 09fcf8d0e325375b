"""The public scripts, and the lines that make each of them movable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import public_stand_ins

IMPORT = "from cadenza.sidecar import client"


@dataclass(frozen=True)
class Script:
    """A public script: where it is, how it runs, and the lines that make it movable."""

    name: str
    repository: str
    path: str
    arguments: str = ""
    lines: Sequence[tuple[str, str]] = ()
    """Changes of a text into another one, see ``add``."""
    needs: Sequence[str] = ()
    """Modules."""
    steps: int = 40
    prepare: Callable[[Path], None] | None = None
    """Makes data, and makes the script small; of the folder of the copy."""
    launcher: str = ""
    """Words between the Python and the script."""
    saves: str = ""
    """Pattern of its own checkpoints, in its folder."""
    resume: str = ""
    """Argument by which it goes on from one."""

    @property
    def added(self) -> int:
        """Number of lines that are added or changed."""
        return sum(len(set(new.splitlines()) - set(old.splitlines())) for old, new in self.lines)


def add(anchor: str, *lines: str) -> tuple[str, str]:
    """Return an insertion: after a text that ends in a line break, else before it."""
    added = "".join(f"{line}\n" for line in lines)
    return anchor, anchor + added if anchor.endswith("\n") else added + anchor


TRANSFORMERS = "PerforatedAI/PerforatedAI-Transformers"
"""A fork of huggingface/transformers 4.57, whose own snapshot is too large to be brought here."""
GLUE = (
    "--model_name_or_path bert-base-cased --train_file nyu-mll/glue/train.csv --validation_file "
    "nyu-mll/glue/validation.csv --do_train --do_eval --max_seq_length 16 --per_device_train_batch_size 8 --use_cpu "
    "--report_to none --gradient_accumulation_steps 1 --num_train_epochs 3"
)
TIMM = (
    "--data-dir pictures --dataset torch/image_folder --model resnet18 --num-classes 2 --input-size 3 32 32 -b 8 "
    "--epochs 6 --cooldown-epochs 0 --warmup-epochs 1 --workers 1 --device cpu --opt adamw --lr 0.001"
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
        needs=("numpy",), prepare=public_stand_ins.write_tokens,
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
        needs=("numpy",), prepare=public_stand_ins.write_tokens,
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
        needs=("torchvision",), prepare=public_stand_ins.write_digits, steps=60,
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
        needs=("torchvision",), prepare=public_stand_ins.fewer_samples, steps=24,
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
        TIMM,
        (
            add("import argparse\n", IMPORT),
            add(
                "    results = []\n",
                "    " + KEEPER + "scheduler=lr_scheduler)",
                "    start_epoch = keeper.restore() or start_epoch",
            ),
            add("                lr_scheduler.step(epoch_p_1, latest_metric)\n", "            keeper.save(epoch + 1)"),
        ),
        needs=("torchvision",), prepare=public_stand_ins.write_pictures, steps=24,
    ),
    Script(
        "timm train.py, persistent_workers=False", "huggingface/pytorch-image-models", "train.py",
        TIMM,
        (
            add("import argparse\n", IMPORT),
            add(
                "    results = []\n",
                "    " + KEEPER + "scheduler=lr_scheduler)",
                "    start_epoch = keeper.restore() or start_epoch",
            ),
            add("                lr_scheduler.step(epoch_p_1, latest_metric)\n", "            keeper.save(epoch + 1)"),
            add("        worker_seeding=args.worker_seeding,\n", "        persistent_workers=False,"),
            add("            num_workers=eval_workers,\n", "            persistent_workers=False,"),
        ),
        needs=("torchvision",), prepare=public_stand_ins.write_pictures, steps=24,
    ),
    Script(
        "PPO", "vwxyzjn/cleanrl", "cleanrl/ppo.py", "--no-cuda --num-steps 32 --total-timesteps 3000",
        (
            add("import random\n", "import cloudpickle", IMPORT),
            add(
                "    # TRY NOT TO MODIFY: start the game\n",
                "    game = {}",
                '    keeper = client.checkpoint("moves", model=agent, optimizer=optimizer, own={"game": game})',
            ),
            (
                "    for iteration in range(1, args.num_iterations + 1):\n",
                ("    if keeper.restore(): envs, next_obs, next_done, global_step, done = cloudpickle.loads(game[0])\n"
                "    for iteration in range(1 + (done if game else 0), args.num_iterations + 1):\n"),
            ),
            add(
                '        writer.add_scalar("charts/SPS", int(global_step / (time.time() - start_time)), global_step)\n',
                "        game[0] = cloudpickle.dumps((envs, next_obs, next_done, global_step, iteration))",
                "        keeper.save(iteration)",
            ),
        ),
        needs=("gymnasium", "tyro", "tensorboard"),
    ),
    Script(
        "DQN", "vwxyzjn/cleanrl", "cleanrl/dqn.py",
        "--no-cuda --buffer-size 2000 --learning-starts 100 --total-timesteps 1000 --target-network-frequency 50",
        (
            add("import random\n", "import cloudpickle", IMPORT),
            (
                "    for global_step in range(args.total_timesteps):\n",
                ("    game, both = {}, [q_network, target_network]\n"
                '    keeper = client.checkpoint("moves", model=both, optimizer=optimizer, own={"game": game})\n'
                "    if keeper.restore(): envs, obs, rb, done = cloudpickle.loads(game[0])\n"
                "    for global_step in range(done if game else 0, args.total_timesteps):\n"),
            ),
            add(
                "(1.0 - args.tau) * target_network_param.data\n                    )\n",
                "            game[0] = cloudpickle.dumps((envs, obs, rb, global_step + 1))",
                "            if global_step % 20 == 0: keeper.save(global_step)",
            ),
        ),
        needs=("gymnasium", "tyro", "tensorboard"),
    ),
    Script(
        "PPO, unmodified", "vwxyzjn/cleanrl", "cleanrl/ppo.py", "--no-cuda --num-steps 32 --total-timesteps 3000",
        needs=("gymnasium", "tyro", "tensorboard"),
    ),
    Script(
        "Trainer run_glue.py", TRANSFORMERS, "examples/pytorch/text-classification/run_glue.py",
        f"{GLUE} --eval_strategy epoch --output_dir {{scratch}}/out",
        (
            add(
                "import random\n",
                "from cadenza.sidecar.client.integrations.transformers import CadenzaTrainerCallback as Cadenza",
            ),
            add("        processing_class=tokenizer,\n", "        callbacks=[Cadenza(checkpoints=True)],"),
            add(
                "        checkpoint = None\n",
                "        training_args.resume_from_checkpoint = Cadenza.newest(training_args.output_dir)",
            ),
        ),
        needs=("transformers", "datasets", "evaluate"), prepare=public_stand_ins.write_glue, steps=36,
    ),
    Script(
        "Lightning transformer.py", "Lightning-AI/pytorch-lightning", "examples/pytorch/basics/transformer.py", "",
        (
            add(
                "import lightning as L\n", "from cadenza.sidecar.client.integrations.lightning import CadenzaCallback"
            ),
            (
                ("    trainer = L.Trainer(gradient_clip_val=0.25, max_epochs=4)\n"
                "    trainer.fit(model, train_dataloader, val_dataloader)\n"),
                ('    cadenza = CadenzaCallback(checkpoints="moves")\n'
                "    trainer = L.Trainer(gradient_clip_val=0.25, max_epochs=4, callbacks=[cadenza])\n"
                "    trainer.fit(model, train_dataloader, val_dataloader, ckpt_path=cadenza.newest())\n"),
            ),
        ),
        needs=("lightning", "requests"), prepare=public_stand_ins.write_words, steps=24,
    ),
    Script(
        "accelerate complete_nlp_example.py", "huggingface/accelerate", "examples/complete_nlp_example.py", "--cpu",
        (
            add("import argparse\n", IMPORT),
            add(
                "    overall_step = 0\n",
                "    " + KEEPER + "scheduler=lr_scheduler)",
            ),
            add("    # Now we train the model\n", "    starting_epoch = keeper.restore() or starting_epoch"),
            add('        if checkpointing_steps == "epoch":', "        keeper.save(epoch + 1)"),
        ),
        needs=("accelerate", "transformers", "datasets", "evaluate"), prepare=public_stand_ins.write_glue, steps=18,
    ),
    Script(
        "FSDP2 example.py", "pytorch/examples", "distributed/FSDP2/example.py", "",
        (
            add("import argparse\n", IMPORT),
            (
                "    for _ in range(10):\n",
                ("    client.attach(model, optim)\n"
                '    keeper = client.checkpoint("moves", model=model, optimizer=optim)\n'
                "    for step in range(keeper.restore() or 0, 10):\n"),
            ),
            add("        optim.zero_grad()\n", "        keeper.at(step + 1)", "        client.boundary()"),
        ),
        prepare=public_stand_ins.on_two_cpus, steps=10, launcher="-m torch.distributed.run --nproc-per-node 2",
    ),
)  # fmt: skip

OWN_SAVES = (
    Script(
        "nanoGPT train.py", "karpathy/nanoGPT", "train.py",
        NANOGPT.replace("eval_interval=10", "eval_interval=8") + " --max_iters=60 --always_save_checkpoint=True",
        needs=("numpy",), prepare=public_stand_ins.write_tokens, saves="out/ckpt.pt", resume="--init_from=resume",
        steps=20,
    ),
    Script(
        "imagenet main.py --dummy", "pytorch/examples", "imagenet/main.py",
        "--dummy --arch resnet18 --batch-size 8 --workers 1 --epochs 8 --print-freq 100 --seed 1",
        needs=("torchvision",), prepare=public_stand_ins.fewer_samples, saves="checkpoint.pth.tar",
        resume="--resume {path}", steps=14,
    ),
    Script(
        "timm train.py", "huggingface/pytorch-image-models", "train.py",
        f"{TIMM} --output out --experiment run", needs=("torchvision",), prepare=public_stand_ins.write_pictures,
        saves="out/run/last.pth.tar", resume="--resume {path}", steps=8,
    ),
    Script(
        "Trainer run_glue.py", TRANSFORMERS, "examples/pytorch/text-classification/run_glue.py",
        f"{GLUE} --save_steps 6 --output_dir out", needs=("transformers", "datasets", "evaluate"),
        prepare=public_stand_ins.write_glue, saves="out/checkpoint-*", resume="--resume_from_checkpoint {path}",
        steps=12,
    ),
    Script(
        "accelerate complete_nlp_example.py", "huggingface/accelerate", "examples/complete_nlp_example.py",
        "--cpu --checkpointing_steps 3", needs=("accelerate", "transformers", "datasets", "evaluate"),
        prepare=public_stand_ins.write_glue, saves="step_*", resume="--resume_from_checkpoint {path}", steps=6,
    ),
)  # fmt: skip
"""Scripts that go on from their own checkpoints, unmodified."""
