"""Direct feedback alignment on a mesh of data x tensor ranks: training without a backward pass.

Fixed random matrices carry the output error straight to every hidden layer, so each layer's update is
known as soon as the error is. Hidden layers are cut by units (activities are gathered between them), the
output layer by its inputs. Updates go to `.grad` by hand, are summed over the data ranks, then SGD steps.

    torchrun --nproc-per-node 4 examples/feedback_alignment.py --tp 2
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class HiddenLayer(nn.Module):
    """tanh units of which this rank holds a part, and the part of the feedback that reaches them."""

    def __init__(self, weight: Tensor, feedback: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(weight.shape[0]))
        self.register_buffer("feedback", feedback)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight, self.bias))

    def set_update(self, x: Tensor, activity: Tensor, error: Tensor) -> None:
        signal = F.linear(error, self.feedback) * (1 - activity.square())
        self.weight.grad = signal.T @ x
        self.bias.grad = signal.sum(0)


class OutputLayer(nn.Module):
    """Reads this rank's units of the last hidden layer."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(weight.shape[0]))

    def forward(self, activity: Tensor, group: dist.ProcessGroup) -> Tensor:
        logits = F.linear(activity, self.weight)
        dist.all_reduce(logits, group=group)
        return logits + self.bias

    def set_update(self, activity: Tensor, error: Tensor) -> None:
        self.weight.grad = error.T @ activity
        self.bias.grad = error.sum(0)


class Network(nn.Module):
    def __init__(self, sizes: list[int], mesh: DeviceMesh, seed: int) -> None:
        super().__init__()
        self.tensor, self.data = mesh.get_group("tp"), mesh.get_group("dp")
        self.tp, place = mesh["tp"].size(), mesh.get_local_rank("tp")
        weights = torch.Generator().manual_seed(seed)
        feedback = torch.Generator().manual_seed(seed + 1)

        def part(rows: int, columns: int, dim: int, stream: torch.Generator) -> Tensor:
            whole = torch.randn(rows, columns, generator=stream) / columns**0.5
            return whole.chunk(self.tp, dim)[place].clone()

        *hidden, outputs = sizes[1:]
        self.hidden = nn.ModuleList(
            HiddenLayer(part(n, m, 0, weights), part(n, outputs, 0, feedback)) for m, n in zip(sizes, hidden)
        )
        self.output = OutputLayer(part(outputs, hidden[-1], 1, weights))

    def _gather_units(self, activity: Tensor) -> Tensor:
        """All units of a layer, (b, units), from this rank's."""
        b, units = activity.shape
        parts = activity.new_empty(self.tp * b, units)
        dist.all_gather_into_tensor(parts, activity, group=self.tensor)
        return parts.view(self.tp, b, units).transpose(0, 1).reshape(b, self.tp * units)

    def train_step(self, x: Tensor, labels: Tensor, samples: int) -> Tensor:
        """Sets the updates of all parameters from this rank's part of `samples`; the loss of that part."""
        seen = []
        for layer in self.hidden:
            activity = layer(x)
            seen.append((layer, x, activity))
            x = self._gather_units(activity)
        logits = self.output(activity, self.tensor)
        error = (logits.softmax(1) - F.one_hot(labels, logits.shape[1])) / samples
        self.output.set_update(activity, error)
        for layer, entered, left in seen:
            layer.set_update(entered, left, error)
        return F.cross_entropy(logits, labels, reduction="sum") / samples

    def reduce_updates(self) -> Tensor:
        """Sums the updates over the data ranks in one bucket; returns their norm over the whole network."""
        grads = [p.grad for p in self.parameters()]
        bucket = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(bucket, group=self.data)
        for p, reduced in zip(self.parameters(), bucket.split([g.numel() for g in grads])):
            p.grad = reduced.view_as(p)
        cut = [p.grad for p in self.parameters() if p is not self.output.bias]
        square = torch.stack([g.square().sum() for g in cut]).sum()
        dist.all_reduce(square, group=self.tensor)
        return (square + self.output.bias.grad.square().sum()).sqrt()


def batches(args: argparse.Namespace, data_rank: int, device: str):
    """Noisy points around one centre per class; each data rank draws its own."""
    centres = torch.randn(args.classes, args.inputs, generator=torch.Generator().manual_seed(args.seed))
    generator = torch.Generator().manual_seed(1000 + args.seed + data_rank)
    while True:
        labels = torch.randint(args.classes, (args.batch_size,), generator=generator)
        noise = torch.randn(args.batch_size, args.inputs, generator=generator)
        yield (centres[labels] + noise).to(device), labels.to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=1, help="ranks over which units are cut")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="per data rank")
    parser.add_argument("--inputs", type=int, default=32)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 64, 32])
    parser.add_argument("--classes", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    device = "cuda" if use_cuda else "cpu"
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if use_cuda else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    data_rank, data_ranks = mesh.get_local_rank("dp"), mesh["dp"].size()

    network = Network([args.inputs, *args.hidden, args.classes], mesh, args.seed).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=args.lr, momentum=args.momentum)

    with torch.no_grad():
        for step, (x, labels) in zip(range(args.steps), batches(args, data_rank, device)):
            loss = network.train_step(x, labels, samples=args.batch_size * data_ranks)
            norm = network.reduce_updates()
            optimizer.step()
            dist.all_reduce(loss, group=mesh.get_group("dp"))
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.6f} update norm {norm.item():.6f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
