"""A GAN on Fashion-MNIST: two models, two optimizers, and two passes over the micro-batches of every step.

    gyrostat run --virtual-workers 4 --workers 2 examples/gan.py

What it shows: iterating a step again gives the same micro-batches once more, with a reduction of its
own; each pass ends with the gradients of both models averaged over all virtual workers, and each
optimizer uses its own. The noise is drawn in the micro-batches, from each virtual worker's own stream.
The generator has batch-norm.

The score is the Fréchet distance between generated and real test images, both seen through the real
ones' 32 main components: the distance of two normal distributions with the same means and covariances,
in the unit of the first component's variance. Lower is better; `floor` is what real training images get.
At the end one image is drawn in characters.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fashion_mnist
import gyrostat

NOISE = 64


def build_generator(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, 2 * width * 7 * 7, bias=False), nn.BatchNorm1d(2 * width * 7 * 7), nn.ReLU(),
        nn.Unflatten(1, (2 * width, 7, 7)),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1), nn.Tanh(),
    )  # fmt: skip


def build_discriminator(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(2 * width * 7 * 7, 1), nn.Flatten(0),
    )  # fmt: skip


class Score:
    """The Fréchet distance to `real` images, through their main components."""

    def __init__(self, real: Tensor, components: int = 32) -> None:
        flat = real.flatten(1).double()
        self.mean: Tensor = flat.mean(dim=0)
        variances, directions = torch.linalg.eigh(torch.cov(flat.T))  # ascending
        self.directions: Tensor = directions[:, -components:]
        self.scale: Tensor = variances[-1]
        self.covariance = torch.diag(variances[-components:] / self.scale)

    def features(self, images: Tensor) -> Tensor:
        centred: Tensor = images.flatten(1).double() - self.mean
        return centred @ self.directions / self.scale.sqrt()

    def distance(self, features: Tensor) -> float:
        covariance = torch.cov(features.T)
        root = self.covariance.sqrt()  # of a diagonal matrix
        cross = torch.linalg.eigvalsh(root @ covariance @ root).clamp(min=0).sqrt().sum()
        spread = covariance.trace() + self.covariance.trace() - 2 * cross
        return float(features.mean(dim=0).square().sum() + spread)


def draw(image: Tensor) -> str:
    """28×28 values of -1 … 1 as 14 lines of characters."""
    levels = ((image.squeeze() + 1) * 4.99).long()[::2].tolist()
    return "\n".join("".join(" .:-=+*#%@"[level] for level in line) for line in levels)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="per virtual worker")
    parser.add_argument("--limit", type=int, default=None, help="the most steps per epoch")
    parser.add_argument("--small", action="store_true", help="fewer images and channels, for tests")
    args = parser.parse_args()

    job = gyrostat.init(seed=7)
    real_images, _ = fashion_mnist.load("train", 512 if args.small else 8_000)
    score = Score(fashion_mnist.load("test", 1_000)[0])
    width = 8 if args.small else 24
    generator = build_generator(width).to(job.device)
    discriminator = build_discriminator(width).to(job.device)
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    train = job.dataloader(
        TensorDataset(real_images), batch_size=args.batch_size, shuffle=True, drop_last=True
    )
    fixed_noise = torch.randn(500 if args.small else 1_000, NOISE, generator=torch.Generator().manual_seed(0))
    samples = job.dataloader(TensorDataset(fixed_noise), batch_size=100)
    job.track(generator=generator, discriminator=discriminator, opt_g=opt_g, opt_d=opt_d)

    def generate(batch: list[Tensor]) -> Tensor:
        images: Tensor = generator(batch[0].to(job.device))
        return images.cpu()

    def fake_images(count: int) -> Tensor:
        images: Tensor = generator(torch.randn(count, NOISE, device=job.device))
        return images

    floor = score.distance(score.features(real_images[: len(fixed_noise)]))
    start = score.distance(score.features(torch.cat(job.evaluate(samples, generate))))
    job.log(frechet=start, floor=floor)

    for _ in job.epochs(args.epochs):
        for step in job.steps(train, limit=args.limit):
            for (real,) in step:  # pass 1: the discriminator learns to tell real from fake
                real = real.to(job.device)
                fake = fake_images(len(real)).detach()
                verdict = discriminator(torch.cat([real, fake]))
                truth = torch.cat([torch.ones(len(real)), torch.zeros(len(real))]).to(job.device)
                loss_d = F.binary_cross_entropy_with_logits(verdict, truth)
                step.backward(loss_d)
                mean_d = job.mean(loss_d)
            opt_d.step()
            opt_d.zero_grad()
            opt_g.zero_grad()
            for (real,) in step:  # pass 2: the generator learns to pass for real
                verdict = discriminator(fake_images(len(real)))
                loss_g = F.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict))
                step.backward(loss_g)
                mean_g = job.mean(loss_g)
            opt_g.step()
            opt_g.zero_grad()
            opt_d.zero_grad()
        images = torch.cat(job.evaluate(samples, generate))
        frechet = score.distance(score.features(images))
        job.log(loss_d=mean_d.item(), loss_g=mean_g.item(), frechet=frechet, floor=floor)

    images = torch.cat(job.evaluate(samples, generate))  # all workers take part; one prints
    if job.is_main:
        print(draw(images[0]))


if __name__ == "__main__":
    main()
