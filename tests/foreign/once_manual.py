"""Programs that optimize manually, in the manner of public ones: GANs, agents, learners in turns.

Each logs its losses, which are compared.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from tests.foreign.once_shelf import Built, Net, counted, mlp, traced


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def update(self, optimizer: Any, loss: Tensor, name: str) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log(name, loss)
        self.trace.append(name)

    def classify(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return Adam(self.parameters(), lr=1e-2)


def put(module: type[ByHand], *args: Any, find_unused: bool = True) -> None:
    def make() -> Built:
        return traced(module(*args))

    make.__name__ = "manual_" + "_".join([module.__name__, *map(str, args)]).lower()
    counted("manual optimization", find_unused=find_unused)(make)


def smooth(inputs: int, outputs: int, hidden: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


# ---- adversaries


class DCGAN(ByHand):
    """Convolutions with batch norm; toggled, as in Lightning's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 64),
            nn.Unflatten(1, (4, 4, 4)),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.ConvTranspose2d(4, 8, 4, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 1, 3, padding=1),
            nn.Tanh(),
        )
        self.critic = nn.Sequential(
            nn.Conv2d(1, 8, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(8, 16, 4, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(64, 1),
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = (batch[0][:, :, None] * batch[0][:, None]).unsqueeze(1)
        forger, critic = self.optimizers()
        noise = torch.randn(len(real), 8, device=self.device)
        self.toggle_optimizer(forger)
        self.update(forger, F.softplus(-self.critic(self.net(noise))).mean(), "forger")
        self.untoggle_optimizer(forger)
        self.toggle_optimizer(critic)
        loss = F.softplus(-self.critic(real)) + F.softplus(self.critic(self.net(noise).detach()))
        self.update(critic, loss.mean(), "critic")
        self.untoggle_optimizer(critic)

    def configure_optimizers(self) -> Any:
        return Adam(self.net.parameters(), lr=1e-3), Adam(self.critic.parameters(), lr=1e-3)


class WGAN(ByHand):
    """The critic has five steps for one of the other, and is clipped or penalized."""

    def __init__(self, bound: str) -> None:
        super().__init__()
        self.bound = bound
        self.net, self.critic = smooth(4, 8), smooth(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, (forger, critic) = batch[0], self.optimizers()
        fake = self.net(torch.randn(len(real), 4, device=self.device))
        loss = self.critic(fake.detach()).mean() - self.critic(real).mean()
        if self.bound == "penalty":
            mixed = real.lerp(fake.detach(), 0.3).requires_grad_()
            (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
            loss = loss + 10 * (slope.norm(dim=1) - 1).square().mean()
        self.update(critic, loss, "critic")
        if self.bound == "clip":
            for parameter in self.critic.parameters():
                parameter.data.clamp_(-0.1, 0.1)
        if batch_idx % 3 == 2:
            self.update(forger, -self.critic(self.net(real[:, :4])).mean(), "forger")

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.RMSprop(self.net.parameters(), lr=1e-3),
            torch.optim.RMSprop(self.critic.parameters(), lr=1e-3),
        )


class CycleGAN(ByHand):
    """Four networks, two optimizers, identity and cycle losses, a pool of old forgeries."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({name: mlp(8, 32, 8) for name in ("there", "back")})
        self.critics = nn.ModuleDict({name: mlp(8, 16, 1) for name in ("there", "back")})
        self.pool: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two = batch[0], batch[0].flip(1) * 2
        forgers, critics = self.optimizers()
        there, back = self.net["there"](one), self.net["back"](two)
        self.toggle_optimizer(forgers)
        cycle = F.l1_loss(self.net["back"](there), one) + F.l1_loss(self.net["there"](back), two)
        same = F.l1_loss(self.net["there"](two), two) + F.l1_loss(self.net["back"](one), one)
        fooled = (1 - self.critics["there"](there)).square() + (
            1 - self.critics["back"](back)
        ).square()
        self.update(forgers, fooled.mean() + 10 * cycle + 5 * same, "forgers")
        self.untoggle_optimizer(forgers)
        self.pool = [*self.pool[-3:], there.detach()]
        self.toggle_optimizer(critics)
        loss = (1 - self.critics["there"](two)).square() + self.critics["there"](
            self.pool[0]
        ).square()
        loss = loss + (1 - self.critics["back"](one)).square()
        self.update(
            critics, (loss + self.critics["back"](back.detach()).square()).mean(), "critics"
        )
        self.untoggle_optimizer(critics)

    def configure_optimizers(self) -> Any:
        chained = itertools.chain(*(part.parameters() for part in self.net.values()))
        return [Adam(chained, lr=2e-3), Adam(self.critics.parameters(), lr=2e-3)], []


class Pix2Pix(ByHand):
    """Conditional: the critic sees the input, too; updates are closures, as in Lightning's docs."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.critic = mlp(8, 32, 8), mlp(16, 32, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        given, wanted = batch[0], batch[0].cumsum(1)
        forger, critic = self.optimizers()

        def forge() -> Tensor:
            made = self.net(given)
            judged = self.critic(torch.cat([given, made], 1))
            loss = F.softplus(-judged).mean() + 100 * F.l1_loss(made, wanted)
            forger.zero_grad()
            self.manual_backward(loss)
            self.log("forger", loss)
            return loss

        def judge() -> Tensor:
            made = self.net(given).detach()
            loss = F.softplus(-self.critic(torch.cat([given, wanted], 1))).mean()
            loss = loss + F.softplus(self.critic(torch.cat([given, made], 1))).mean()
            critic.zero_grad()
            self.manual_backward(loss)
            self.log("critic", loss)
            return loss

        with forger.toggle_model():
            forger.step(closure=forge)
        with critic.toggle_model():
            critic.step(closure=judge)

    def configure_optimizers(self) -> Any:
        return (
            {"optimizer": Adam(self.net.parameters(), lr=1e-3)},
            {"optimizer": Adam(self.critic.parameters(), lr=1e-3)},
        )


class VQGAN(ByHand):
    """A codebook, and a critic that joins late, weighted by gradients of the last layer."""

    def __init__(self, weight: str) -> None:
        super().__init__()
        self.weight = weight
        self.net, self.decoder, self.critic = mlp(8, 32, 4), smooth(4, 8), mlp(8, 16, 1)
        self.codes = nn.Embedding(16, 4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        makers, critic = self.optimizers()
        found = self.net(batch[0])
        nearest = torch.cdist(found, self.codes.weight.detach()).argmin(1)
        code = self.codes(nearest)
        commitment = F.mse_loss(found, code.detach()) + F.mse_loss(code, found.detach())
        made = self.decoder(found + (code - found).detach())
        quality, fooled = F.l1_loss(made, batch[0]), -self.critic(made).mean()
        share: Any = 0.1
        if self.weight == "adaptive":
            last = self.decoder[-1].weight
            slopes = [
                torch.autograd.grad(loss, last, retain_graph=True)[0].norm()
                for loss in (quality, fooled)
            ]
            share = (slopes[0] / (slopes[1] + 1e-4)).clamp(0, 1e4).detach()
        self.update(makers, quality + commitment + share * fooled, "makers")
        if self.global_step > 4:
            loss = F.relu(1 - self.critic(batch[0])) + F.relu(1 + self.critic(made.detach()))
            self.update(critic, loss.mean(), "critic")

    def configure_optimizers(self) -> Any:
        makers = (*self.net.parameters(), *self.decoder.parameters(), *self.codes.parameters())
        return Adam(makers, lr=1e-3), Adam(self.critic.parameters(), lr=1e-3)


class VAEGAN(ByHand):
    """Three optimizers, whose losses share one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.decoder, self.critic = mlp(8, 32, 8), mlp(4, 32, 8), mlp(8, 16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        encoder, decoder, critic = self.optimizers()
        mean, spread = self.net(batch[0]).chunk(2, 1)
        made = self.decoder(mean + torch.randn_like(mean) * (spread / 2).exp())
        prior = (mean.square() + spread.exp() - spread - 1).mean()
        quality = F.mse_loss(made, batch[0])
        encoder.zero_grad()
        decoder.zero_grad()
        self.manual_backward(quality + prior - 0.1 * self.critic(made).mean())
        encoder.step()
        decoder.step()
        self.log("quality", quality)
        loss = F.softplus(-self.critic(batch[0])) + F.softplus(self.critic(made.detach()))
        self.update(critic, loss.mean(), "critic")

    def configure_optimizers(self) -> Any:
        return [Adam(part.parameters(), lr=1e-3) for part in (self.net, self.decoder, self.critic)]


# ---- agents


class SAC(ByHand):
    """Two critics with targets that follow, and a temperature that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8, 32, 4)
        self.critics = nn.ModuleList([mlp(10, 32, 1), mlp(10, 32, 1)])
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.temperature = nn.Parameter(torch.zeros(()))

    def act(self, state: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.net(state).chunk(2, 1)
        chosen = torch.distributions.Normal(mean, F.softplus(spread) + 1e-3, validate_args=False)
        action = chosen.rsample()
        return action.tanh(), chosen.log_prob(action).sum(1, keepdim=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        state, reward, after = batch[0], batch[0][:, :1], batch[0].roll(1, 1)
        actor, critic, temperature = self.optimizers()
        with torch.no_grad():
            action, chance = self.act(after)
            values = [q(torch.cat([after, action], 1)) for q in self.targets]
            goal = reward + 0.9 * (torch.minimum(*values) - self.temperature.exp() * chance)
        taken = torch.cat([state, state[:, :2].tanh()], 1)
        self.update(critic, sum(F.mse_loss(q(taken), goal) for q in self.critics), "critic")
        action, chance = self.act(state)
        values = [q(torch.cat([state, action], 1)) for q in self.critics]
        loss = (self.temperature.exp().detach() * chance - torch.minimum(*values)).mean()
        self.update(actor, loss, "actor")
        self.update(temperature, -(self.temperature * (chance.detach() - 2)).mean(), "temperature")
        with torch.no_grad():
            for slow, fast in zip(
                self.targets.parameters(), self.critics.parameters(), strict=True
            ):
                slow.data.mul_(0.9).add_(0.1 * fast.data)

    def configure_optimizers(self) -> Any:
        return (
            Adam(self.net.parameters(), lr=1e-3),
            Adam(self.critics.parameters(), lr=1e-3),
            Adam([self.temperature], lr=1e-2),
        )


class PPO(ByHand):
    """Several epochs over minibatches in one step, clipped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.critic = mlp(8, 32, 5), mlp(8, 32, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        state, action = batch
        optimizer: Any = self.optimizers()
        with torch.no_grad():
            before = self.net(state).log_softmax(1).gather(1, action[:, None])
            reward = state.sum(1, keepdim=True)
            gain = reward - self.critic(state)
        for _ in range(2):
            for part in torch.arange(len(state)).chunk(2):
                logits = self.net(state[part]).log_softmax(1)
                ratio = (logits.gather(1, action[part, None]) - before[part]).exp()
                bounded = torch.minimum(ratio * gain[part], ratio.clamp(0.8, 1.2) * gain[part])
                value = F.mse_loss(self.critic(state[part]), reward[part])
                entropy = -(logits.exp() * logits).sum(1).mean()
                loss = -bounded.mean() + 0.5 * value - 0.01 * entropy
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(
                    optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm"
                )
                optimizer.step()
        self.log("loss", loss)


class DQN(ByHand):
    """The target takes the whole state of the network every third step."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        state, action = batch
        optimizer: Any = self.optimizers()
        if batch_idx % 3 == 0:
            self.target.load_state_dict(self.net.state_dict())
        with torch.no_grad():
            goal = state[:, 0] + 0.9 * self.target(state.roll(1, 1)).amax(1)
        value = self.net(state).gather(1, action[:, None])[:, 0]
        self.update(optimizer, F.smooth_l1_loss(value, goal), "loss")

    def configure_optimizers(self) -> Any:
        return Adam(self.net.parameters(), lr=1e-3)


# ---- learners in turns


class Distills(ByHand):
    """A frozen teacher, and two students that also learn of one another."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.teacher = mlp(), mlp(8, 64, 5).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        with torch.no_grad():
            wanted = self.teacher(batch[0]).softmax(1)
        one, two = self.net(batch[0]).log_softmax(1), self.other(batch[0]).log_softmax(1)
        mutual = F.kl_div(one, two.detach().exp(), reduction="batchmean")
        self.update(first, F.nll_loss(one, batch[1]) - (wanted * one).sum(1).mean() + mutual, "one")
        mutual = F.kl_div(two, one.detach().exp(), reduction="batchmean")
        self.update(second, F.nll_loss(two, batch[1]) + mutual, "two")

    def configure_optimizers(self) -> Any:
        return AdamW(self.net.parameters(), lr=1e-3), SGD(self.other.parameters(), lr=0.05)


class Adapts(ByHand):
    """Adversarial domain adaptation: features that a critic of domains cannot tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.classes, self.critic = mlp(8, 32, 16), mlp(16, 16, 5), mlp(16, 16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        source, target = self.net(batch[0]), self.net(batch[0] * 1.5 + 0.3)
        learners, critic = self.optimizers()
        for _ in range(2):
            loss = F.softplus(-self.critic(source.detach())) + F.softplus(
                self.critic(target.detach())
            )
            self.update(critic, loss.mean(), "critic")
        fooled = F.softplus(-self.critic(target)).mean()
        loss = F.cross_entropy(self.classes(source), batch[1]) + 0.1 * fooled
        self.update(learners, loss, "learners")

    def configure_optimizers(self) -> Any:
        learners = [*self.net.parameters(), *self.classes.parameters()]
        return Adam(learners, lr=1e-3), Adam(self.critic.parameters(), lr=1e-3)


class TakesTurns(ByHand):
    """Two heads of one body: their optimizers step in alternation."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.heads = mlp(8, 32, 16), nn.ModuleList([mlp(16, 16, 5), mlp(16, 16, 5)])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        turn = batch_idx % 2
        loss = F.cross_entropy(self.heads[turn](self.net(batch[0])), batch[1])
        self.update(self.optimizers()[turn], loss, f"head {turn}")

    def configure_optimizers(self) -> Any:
        return [Adam([*self.net.parameters(), *head.parameters()], lr=1e-3) for head in self.heads]


class Schedules(ByHand):
    """Two optimizers for parts of one network, each with its scheduler."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        body, head = self.optimizers()
        for optimizer in (body, head):
            optimizer.zero_grad()
        loss = self.classify(batch)
        self.manual_backward(loss)
        for optimizer, scheduler in zip((body, head), self.lr_schedulers(), strict=True):
            optimizer.step()
            scheduler.step()
        self.trace.append([optimizer.param_groups[0]["lr"] for optimizer in (body, head)])
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        body, head = Adam(self.net[:4].parameters(), lr=1e-2), SGD(self.net[4].parameters(), 0.1)
        return [body, head], [
            torch.optim.lr_scheduler.StepLR(body, 2),
            torch.optim.lr_scheduler.CosineAnnealingLR(head, 8),
        ]


class Surgery(ByHand):
    """Gradients of two tasks, projected where they conflict (PCGrad)."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        found = self.net(batch[0])
        tasks = F.cross_entropy(found, batch[1]), found.square().mean()
        gradients = []
        for loss in tasks:
            self.manual_backward(loss, retain_graph=True)
            gradients.append([p.grad.clone() for p in self.net.parameters()])
            optimizer.zero_grad()
        along = sum((one * two).sum() for one, two in zip(*gradients, strict=True))
        size = sum(two.square().sum() for two in gradients[1])
        share = (along / size).clamp(max=0)
        for p, one, two in zip(self.net.parameters(), *gradients, strict=True):
            p.grad = one - share * two + two
        optimizer.step()
        self.log("loss", tasks[0])


class Accumulates(ByHand):
    """Gradients of three batches, clipped and scaled by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.classify(batch) / 3
        self.manual_backward(loss)
        if batch_idx % 3 == 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.trace.append(self.global_step)
        self.log("loss", loss)


class SearchesLines(ByHand):
    """L-BFGS with a closure."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.classify(batch)
            self.manual_backward(loss)
            self.trace.append("asked")
            return loss

        self.log("loss", optimizer.step(closure=closure))

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2, tolerance_change=0)


class Sharpness(ByHand):
    """SAM by hand: up along the gradient, the gradient there, and back."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.classify(batch))
        with torch.no_grad():
            moves = [0.05 * p.grad for p in self.net.parameters()]
            for parameter, move in zip(self.net.parameters(), moves, strict=True):
                parameter.add_(move)
        loss = self.classify(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        with torch.no_grad():
            for parameter, move in zip(self.net.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        self.log("loss", loss)


class Averages(ByHand):
    """An average of weights that follows each update, and is what validation would use."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.update(self.optimizers(), self.classify(batch), "loss")
        with torch.no_grad():
            for slow, fast in zip(self.average.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)

    def configure_optimizers(self) -> Any:
        return Adam(self.net.parameters(), lr=1e-2)


put(DCGAN)
put(WGAN, "clip")
put(WGAN, "penalty")
put(CycleGAN)
put(Pix2Pix)
put(VQGAN, "fixed")
put(VQGAN, "adaptive")
put(VAEGAN)
put(SAC)
put(PPO)
put(DQN)
put(Distills)
put(Adapts)
put(TakesTurns)
put(Schedules)
put(Surgery)
put(Accumulates)
put(SearchesLines)
put(Sharpness)
put(Averages)
