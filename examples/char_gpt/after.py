"""Train a small GPT with votes of one bit per parameter; before.py does it with DDP and AdamW.

torchrun --nproc-per-node 2 examples/char_gpt/after.py
torchrun --nproc-per-node 2 examples/char_gpt/after.py --init-from resume
diff -u examples/char_gpt/before.py examples/char_gpt/after.py
"""

import argparse
import math
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, Text

import distlion

LEARNING_RATE = 2e-3  # AdamW's own rate, which nobody has tuned
WEIGHT_DECAY = 0.1

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--data", type=Path, help="file to learn, byte by byte")
parser.add_argument("--folder", type=Path, default=Path("runs/char-gpt"))
parser.add_argument("--init-from", choices=("scratch", "resume"), default="scratch")
parser.add_argument("--iterations", type=int, default=200)
parser.add_argument("--eval-every", type=int, default=50)
parser.add_argument("--eval-batches", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=16, help="sequences of a backward pass")
parser.add_argument("--accumulation", type=int, default=2, help="backward passes of a step")
parser.add_argument("--context", type=int, default=64, help="bytes of a sequence")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--heads", type=int, default=2)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
parser.add_argument("--init-scale", type=float, default=2.0**16, help="of the loss in float16")
args = parser.parse_args()

kind = "cuda" if torch.cuda.is_available() else "cpu"
device = f"cuda:{os.environ['LOCAL_RANK']}" if kind == "cuda" else "cpu"
if kind == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

text = Text(args.data, args.context, device)
torch.manual_seed(0)
sizes = {"layers": args.layers, "heads": args.heads, "width": args.width}
model = GPT(args.context, **sizes, dropout=args.dropout).to(device)

# Matrices decay; biases and gains do not.
matrices = [(name, param) for name, param in model.named_parameters() if param.dim() >= 2]
others = [(name, param) for name, param in model.named_parameters() if param.dim() < 2]
groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
optimizer = distlion.DistributedLion(
    groups,
    LEARNING_RATE,
    weight_decay=WEIGHT_DECAY,
    cautious=True,
    clip_norm=distlion.ClipNorm(1.0, scope="global"),
)
scaler = torch.amp.GradScaler(kind, init_scale=args.init_scale, enabled=args.dtype == "float16")
mixed = torch.autocast(kind, getattr(torch, args.dtype), enabled=args.dtype != "float32")


def find_rate(iteration):
    """Return the share of the learning rate: a warm-up over a fifth, then a cosine to a tenth."""
    done, warm_up = iteration / args.iterations, 0.2
    if done < warm_up:
        return (iteration + 1) / (warm_up * args.iterations + 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (done - warm_up) / (1 - warm_up)))


@torch.no_grad()
def evaluate():
    """Return the loss on the same validation batches each time."""
    torch.manual_seed(0)
    model.eval()
    losses = []
    for _ in range(args.eval_batches):
        with mixed:
            losses.append(model(*text.draw("validation", args.batch_size)).item())
    model.train()
    return sum(losses) / len(losses)


first, best = 0, math.inf
if args.init_from == "resume":
    saved = distlion.load_checkpoint(args.folder, model, optimizer).extra  # on every rank
    scaler.load_state_dict(saved["scaler"])
    first, best = saved["iteration"], saved["best"]
distlion.check_checkpoint_folder(args.folder, model, optimizer)  # now, and not at the first save

for iteration in range(first, args.iterations + 1):
    if iteration % args.eval_every == 0:
        found = torch.tensor(evaluate() if rank == 0 else 0.0, dtype=torch.float64, device=device)
        dist.broadcast(found, src=0)  # the others wait here, and then they know it too
        loss = found.item()
        if rank == 0:
            print(f"iteration {iteration}: validation loss {loss:.4f}", flush=True)
        if loss < best and iteration > 0:
            best = loss
            saved = {"scaler": scaler.state_dict(), "iteration": iteration, "best": best}
            distlion.save_checkpoint(args.folder, model, optimizer, extra=saved)  # on every rank
    if iteration == args.iterations:
        break

    torch.manual_seed(1 + iteration * world_size + rank)  # of data and dropout, resumed or not
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * find_rate(iteration)
    for part in range(args.accumulation):
        is_last = part == args.accumulation - 1
        with nullcontext() if is_last else optimizer.no_sync():
            with mixed:
                loss = model(*text.draw("train", args.batch_size)) / args.accumulation
            scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    norm = optimizer.grad_norm or math.nan  # none before the first step that is not skipped
    optimizer.zero_grad()
    if rank == 0 and iteration % 10 == 0:
        print(f"iteration {iteration}: loss {loss * args.accumulation:.4f}, norm {norm:.2f}")

optimizer.verify_replicas()
dist.destroy_process_group()
