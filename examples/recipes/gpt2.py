r"""GPT-2 on OpenWebText, streamed: arXiv:2404.00438, section 5.

    torchrun --nproc-per-node 2 examples/recipes/gpt2.py --tiny      # bytes of Python's own manual

On a cluster, without downloading the data first:

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/recipes/gpt2.py --size 350M --data Skylion007/openwebtext
    ... --data "corpus/*.txt"                                        # or files of your own

Sizes: the paper trains models like GPT-2 of 350 and 760 million parameters; 124M is GPT-2 itself.
One of its authors has published a command for GPT-2 of 124 million parameters on OpenWebText
(kyleliang919/distributed-lion-pytorch). It has lr 1e-4, weight decay 0.1, 2,000 steps of warm-up,
100,000 steps, and 8 micro-steps of 20 sentences a worker. The betas and the cosine are Lion's,
arXiv:2302.06675. We keep these numbers for larger models, and have not tuned them.
"""

import argparse
import itertools
from collections.abc import Iterable, Iterator
from pydoc_data import topics
from typing import Any

import datasets
import torch
from datasets.distributed import split_dataset_by_node
from runner import Batch, Numbers, Workers, add_options, train
from torch import Tensor, nn
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

SIZES = {  # layers, heads, width
    "124M": (12, 12, 768),
    "350M": (24, 16, 1024),
    "760M": (24, 16, 1536),
    "1.5B": (48, 25, 1600),
}
NUMBERS = Numbers(
    100_000, 20, lr=1e-4, weight_decay=0.1, accumulation=8, warmup_steps=2000, clip=1.0
)
TINY = Numbers(100, 4, lr=1e-3, weight_decay=0.1, accumulation=2, warmup_steps=10, clip=1.0)


class Bytes:
    """A tokenizer with bytes as tokens, and 256 for the end of a text."""

    vocab_size, eos_token_id = 257, 256

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


def open_texts(args: argparse.Namespace) -> Any:
    """Return a stream of rows with a ``text`` each."""
    if args.data is None:
        rows = [{"text": text} for _, text in sorted(topics.topics.items())]
        return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=8)
    if args.data.endswith((".txt", ".txt.gz")):
        files = {"train": args.data}
        return datasets.load_dataset(
            "text", data_files=files, split="train", streaming=True, sample_by="document"
        )
    return datasets.load_dataset(args.data, split="train", streaming=True)


def deal(texts: Any, unseen: frozenset[str], workers: Workers, epoch: int) -> Iterator[str]:
    """Yield a worker's share of all training texts, in an epoch's order."""
    stream = texts.shuffle(seed=epoch, buffer_size=10_000)
    n_texts = 0
    for row in split_dataset_by_node(stream, workers.rank, workers.size):
        if row["text"] not in unseen:  # copies of validation texts are left out too
            n_texts += 1
            yield row["text"]
    if n_texts == 0:
        raise SystemExit(f"worker {workers.rank} has no text to train on: lower --held-out")


def pack(texts: Iterable[str], tokenizer: Any, context: int) -> Iterator[Tensor]:
    """Yield sentences of (context + 1,) int64, cut from consecutive texts."""
    tokens: list[int] = []
    for text in texts:
        tokens += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        while len(tokens) > context:
            yield torch.tensor(tokens[: context + 1])
            tokens = tokens[context:]


def main() -> None:
    """Train, and print the validation loss."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser)
    parser.add_argument("--size", choices=list(SIZES), default="124M")
    parser.add_argument("--data", help="a name on the Hugging Face Hub, or text files")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a sentence")
    parser.add_argument("--held-out", type=int, default=2000, help="first texts, for validation")
    args = parser.parse_args()
    if args.data is None and not args.tiny:
        parser.error(
            "--data: a data set's name such as Skylion007/openwebtext, or files; or --tiny"
        )
    workers = Workers()
    numbers, shape, tokenizer = NUMBERS, SIZES[args.size], None
    if args.tiny:
        numbers, shape, args.context, args.held_out = TINY, (2, 2, 64), 64, 8
        tokenizer = Bytes()
    numbers = numbers.changed_by(args)
    tokenizer = tokenizer or AutoTokenizer.from_pretrained("gpt2", model_max_length=10**9)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=tokenizer.vocab_size,
            n_positions=args.context,
            n_layer=shape[0],
            n_head=shape[1],
            n_embd=shape[2],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            use_cache=False,
        )
    )
    texts = open_texts(args)
    held_out = [row["text"] for row in texts.take(args.held_out)]
    unseen = frozenset(held_out)

    def read(epoch: int) -> Iterator[Tensor]:
        return pack(deal(texts, unseen, workers, epoch), tokenizer, args.context)

    def batches(step: int) -> Iterator[Batch]:
        sentences = itertools.chain.from_iterable(read(epoch) for epoch in itertools.count())
        # A resumed run skips over the sentences already read, so that it ends as without the pause.
        mine = itertools.islice(sentences, step * numbers.accumulation * numbers.batch, None)
        while True:
            yield {"tokens": torch.stack(list(itertools.islice(mine, numbers.batch)))}

    def loss_of(net: nn.Module, batch: Batch) -> Tensor:
        tokens = batch["tokens"].to(workers.device)
        logits = net(tokens[:, :-1]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def evaluate(net: nn.Module) -> str:
        sentences = pack(held_out, tokenizer, args.context)
        mine = list(itertools.islice(sentences, workers.rank, 64 * workers.size, workers.size))
        losses = [loss_of(net, {"tokens": tokens[None]}).item() for tokens in mine]
        total, n = workers.add(sum(losses), len(losses))
        return f"{total / n:.4f} nats of validation loss on {n:.0f} sentences"

    train(args, workers, model, numbers, batches=batches, loss_of=loss_of, evaluate=evaluate)


if __name__ == "__main__":
    main()
