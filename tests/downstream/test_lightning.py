"""`HmpxPrecision` in Lightning's hands: what Lightning alone has; `test_trainers` has what every trainer does."""

import logging
import pickle
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import hmpx
from hmpx.integrations.lightning import HmpxPrecision, HPUPrecisionPlugin
from tests.downstream.by_hand import RECIPES, ByHand, adamw, batches, bits, clip_norm, loader, net
from tests.downstream.lightning_net import Net
from tests.downstream.trainers import lightning_trainer, scheduled

pytestmark = pytest.mark.filterwarnings("ignore")
BF16 = torch.bfloat16


def test_schedulers_go_on():
    """The rate halves every other step."""
    model = Net(scheduled)
    lightning_trainer(RECIPES["stochastic"]).fit(model, loader())
    by_hand = ByHand(net(), "stochastic", prefix="net.")
    scheduler = torch.optim.lr_scheduler.StepLR(by_hand.optimizer, 2, 0.5)
    for batch in batches():
        by_hand.train([batch])
        scheduler.step()
    assert bits(model.net) == bits(by_hand.model)


def test_no_optimizer_and_frozen_parameters_are_taken():
    lightning_trainer(RECIPES["stochastic"]).fit(Net(lambda model: None), loader())
    model = Net(lambda model: adamw(p for p in model.parameters() if p.requires_grad))
    model.net[0].requires_grad_(False)
    lightning_trainer(RECIPES["stochastic"]).fit(model, loader())
    reference = net()
    reference[0].requires_grad_(False)
    by_hand = ByHand(reference, "stochastic", of=lambda name: not name.startswith("0."), prefix="net.")
    assert bits(model.net) == bits(by_hand.train(batches()).model)


class Manual(Net):
    """Two optimizers, stepped in turn by hand, the second in a closure and with clipping."""

    automatic_optimization = False

    def training_step(self, batch, index):
        first, second = self.optimizers()

        def closure():
            second.zero_grad()
            self.manual_backward(self._loss("train", batch))
            self.clip_gradients(second, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

        if index % 2:
            second.step(closure)
        else:
            first.zero_grad()
            self.manual_backward(self._loss("train", batch))
            first.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1, momentum=0.9), adamw(self.net[2:].parameters())


def test_several_optimizers_by_manual_optimization():
    model, reference = Manual(), net()
    lightning_trainer(RECIPES["stochastic"]).fit(model, loader())

    def sgd(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    first = ByHand(reference, "stochastic", sgd, lambda name: name[0] == "0", "net.")
    second = ByHand(reference, "stochastic", adamw, lambda name: name[0] in "23", "net.")
    for i, batch in enumerate(batches()):
        chosen = (first, second)[i % 2]
        for p in chosen.params.values():
            p.grad = None
        chosen.loss(batch).backward()
        if i % 2:
            clip_norm(chosen.params.values(), 0.1)
        chosen.step()
    assert bits(model.net) == bits(reference)


def test_lbfgs_calls_its_closure_with_casts_on():
    model = Net(lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    lightning_trainer(RECIPES["master"]).fit(model, loader(2))
    by_hand = ByHand(net(), "master", lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3))
    for batch in batches(2):

        def closure(batch=batch):
            by_hand.model.zero_grad()
            with torch.no_grad():
                for name, p in by_hand.params.items():
                    p.copy_(by_hand.copies[name])
            loss = by_hand.loss(batch)
            loss.backward()
            for name, p in by_hand.params.items():
                by_hand.copies[name].grad = p.grad.float()
            return loss

        by_hand.optimizer.step(closure)
        by_hand.write_back()
    assert model.dtypes["train"] is BF16 and bits(model.net) == bits(by_hand.model)


def test_casts_are_on_in_the_model_alone_and_torch_is_put_back():
    product, seen = torch.matmul, {}

    class Watching(pl.Callback):
        def on_before_optimizer_step(self, *_):
            seen["callback"] = torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype

        def on_validation_epoch_end(self, *_):
            seen["validated"] = torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype

    model = Net()
    run = lightning_trainer(RECIPES["stochastic"], callbacks=[Watching()])
    run.fit(model, loader(), loader(1))
    assert torch.matmul is product and not hmpx.base.process_state.in_use().keys() - {"awaited"}
    run.validate(model, loader(1), verbose=False)
    run.test(model, loader(1), verbose=False)
    run.predict(model, loader(1))
    assert model.dtypes == dict.fromkeys(("train", "validate", "test", "predict"), BF16)
    assert seen == {"callback": torch.float32, "validated": torch.float32}
    assert torch.matmul is product


def test_a_pickled_plugin_serves_and_a_checkpoint_after_the_fit_holds_the_masters(tmp_path):
    """As `ddp_spawn` sends it."""
    model, run = Net(), lightning_trainer(pickle.loads(pickle.dumps(HmpxPrecision(RECIPES["master"]))))
    run.fit(model, loader())
    assert bits(model.net) == bits(ByHand(net(), "master").train(batches()).model)
    run.save_checkpoint(tmp_path / "end.ckpt")
    saved = torch.load(tmp_path / "end.ckpt", weights_only=False)["optimizer_states"][0]
    assert saved["state"][0]["hmpx_master"].dtype is torch.float32


def test_an_error_in_training_puts_torch_back():
    product = torch.matmul

    class Failing(Net):
        def training_step(self, batch, index):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        lightning_trainer(RECIPES["stochastic"]).fit(Failing(), loader())
    assert torch.matmul is product


def test_a_second_optimizer_that_is_refused_leaves_the_first_and_the_model_as_they_were():
    """Adadelta has no kernels, and this recipe asks for them."""
    model, product = net(), torch.matmul
    before = [(p, p.dtype, p.detach().clone()) for p in model.parameters()]
    optimizers = [adamw(model[0].parameters()), torch.optim.Adadelta(model[3].parameters())]
    plugin = HmpxPrecision({**RECIPES["stochastic"], "fused": True})
    with pytest.raises(hmpx.HmpxError, match="not for Adadelta"):
        plugin.connect(plugin.convert_module(model), optimizers, [])
    plugin.teardown()
    for p, (was, dtype, numbers) in zip(model.parameters(), before, strict=True):
        assert p is was and p.dtype is dtype and torch.equal(p, numbers)
    assert all("hmpx" not in str(vars(each).keys()) for each in optimizers) and torch.matmul is product
    for optimizer in optimizers:
        hmpx.attach(optimizer)
        hmpx.detach(optimizer)


def test_a_second_fit_goes_on_by_the_same_plugin():
    run, model = lightning_trainer(RECIPES["stochastic"]), Net()
    run.fit(model, loader())
    first = bits(model)
    run.fit_loop.max_epochs = 2
    run.fit(model, loader())
    assert bits(model) != first and run.global_step == 16


def test_lightnings_own_precision_and_a_second_plugin_are_refused():
    with pytest.raises(ValueError, match=r"precision=.*HmpxPrecision\('hmp-o1'\)`. Choose one"):
        lightning_trainer("hmp-o1", precision="bf16-mixed")
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="Precision"):
        pl.Trainer(accelerator="cpu", plugins=[HmpxPrecision("hmp-o1"), HmpxPrecision("hmp-o2")])


def test_another_recipe_in_force_is_refused():
    with hmpx.activate("hmp-o1"), pytest.raises(hmpx.HmpxError, match="HmpxPrecision"):
        lightning_trainer(RECIPES["stochastic"]).fit(Net(), loader())


def test_a_wrong_recipe_raises_when_the_plugin_is_made(monkeypatch):
    with pytest.raises(hmpx.HmpxError, match="did you mean 'neuron-bf16-sr'"):
        HmpxPrecision("neuron-bf16-st")
    with pytest.raises(hmpx.HmpxError, match="did you mean 'state_dtype'"):
        HmpxPrecision("bf16-sr", state_dtyp="8bit")
    with pytest.raises(hmpx.HmpxError, match="needs a recipe"):
        HmpxPrecision()
    monkeypatch.setattr("hmpx.updates.attach.torch", SimpleNamespace(Tensor=object, __version__="2.12"))
    with pytest.raises(hmpx.HmpxError, match=r"nxd-standard.yaml:\d+: use_fp32_grad_acc needs torch 2.11"):
        HmpxPrecision("nxd-standard")


def test_the_arguments_of_lightnings_removed_plugin(tmp_path):
    """As hmp.convert with the same arguments in a loop by hand; a zero for the letter O too."""
    (tmp_path / "bf16.txt").write_text("linear\nrelu\n")
    (tmp_path / "fp32.txt").write_text("cross_entropy\nlayer_norm\n")
    lists = {f"{side}_file_path": str(tmp_path / f"{side}.txt") for side in ("bf16", "fp32")}
    for arguments in ({"opt_level": "O1", **lists}, {"opt_level": "O2"}):
        plugins = [HPUPrecisionPlugin(precision=16, verbose=False, **arguments), HmpxPrecision(**arguments)]
        models = [Net() for _ in plugins]
        for plugin, model in zip(plugins, models, strict=True):
            lightning_trainer(plugin).fit(model, loader())
        reference = net()
        optimizer = adamw(reference.parameters())
        with hmpx.hmp.convert(**arguments):
            for inputs, targets in batches():
                optimizer.zero_grad()
                nn.functional.cross_entropy(reference(inputs), targets).backward()
                optimizer.step()
        assert bits(models[0].net) == bits(models[1].net) == bits(reference)
        assert models[0].net[0].weight.dtype is torch.float32
    model = Net()
    lightning_trainer(HPUPrecisionPlugin(32)).fit(model, loader())
    assert model.dtypes["train"] is torch.float32
    with pytest.raises(hmpx.HmpxError, match="precision=64 is none of"):
        HPUPrecisionPlugin(64)


def test_inputs_are_mapped_where_the_recipe_maps_dtypes(caplog):
    """And with `verbose` each decision is logged."""
    model = Net()
    with caplog.at_level(logging.INFO, "hmpx"):
        lightning_trainer(HmpxPrecision("xla-use-bf16", verbose=True)).fit(model, loader(1))
    assert model.dtypes["train"] is BF16 and torch.zeros(1, dtype=torch.float32).dtype is torch.float32
    assert any("linear" in message for message in caplog.messages)
