"""Train a small model, publish each step, and follow it from the same process.

    python tools/examples/train_and_follow.py ./run

FP32 masters are published as BF16, as an inference engine would hold them.
"""

from __future__ import annotations

import sys

import torch

import deltafmt


def main(root: str, steps: int = 5) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)

    writer = deltafmt.Writer(root, publish_dtype="bfloat16")
    writer.publish_anchor(model.state_dict(), step=0)

    engine = {name: torch.empty_like(tensor).bfloat16() for name, tensor in model.state_dict().items()}
    receiver = deltafmt.Receiver(root, engine)
    receiver.advance()

    for step in range(1, steps + 1):
        inputs = torch.randn(32, 64)
        loss = (model(inputs) - inputs[:, :8]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        writer.publish(model.state_dict(), step=step, meta={"loss": loss.detach()})
        receiver.advance()

    for info in deltafmt.open(root).log():
        changed = "all" if info.changed is None else f"{info.changed:,}"
        print(f"version {info.version}: {changed} elements changed, {info.stored_bytes:,} bytes")
    assert receiver.verify().complete
    assert all(torch.equal(engine[name], tensor.bfloat16()) for name, tensor in model.state_dict().items())
    print("the engine's tensors are the trainer's, bit for bit")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
